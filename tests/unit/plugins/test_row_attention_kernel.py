"""The Triton kernels of RowAttention, under Triton's CPU interpreter, against the reference.

Every tensor stands in a larger allocation full of NaN, and caches hold NaN and Inf behind the last live position of
each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.launches import SPLIT_POSITIONS, RowAttentionOperation
from dspark_trt_plugins.row_attention.reference import row_attention

from tests.support.interpreted_kernels import run_interpreted
from tests.support.row_attention_cases import TOLERANCE, Arrays, block, causal, random_rows

ELEMENT_TYPES = tuple(TOLERANCE)


def run(form: RowAttentionForm, inputs: Arrays) -> np.ndarray[Any, Any]:
    return run_interpreted(RowAttentionOperation(form), inputs)["attended"]


def assert_right(form: RowAttentionForm, inputs: Arrays) -> np.ndarray[Any, Any]:
    found = run(form, inputs)
    expected = row_attention(form, **inputs)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=TOLERANCE[form.element_type])
    return found


@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(8, 2, 32), (9, 3, 64), (3, 3, 32), (6, 1, 16), (10, 1, 80), (3, 1, 96), (4, 2, 8), (4, 1, 128)],
)
def test_every_grouping_of_heads_and_every_type(
    num_heads: int, num_kv_heads: int, head_dim: int, element_type: Any
) -> None:
    form = RowAttentionForm(num_heads, num_kv_heads, head_dim, 400, 6, element_type)
    assert_right(form, random_rows(form, causal([70, 0, 300], 6)))


@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
@pytest.mark.parametrize("num_slots", range(1, 9))
def test_every_length_of_a_query(num_slots: int, element_type: Any) -> None:
    form = RowAttentionForm(4, 1, 32, 300, 8, element_type)
    assert_right(form, random_rows(form, causal([280, 17], num_slots)))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_slots"), [(16, 1, 8), (3, 1, 23), (1, 1, 70)])
@pytest.mark.parametrize("element_type", ["float32", "float16"])
def test_queries_of_a_key_head_that_no_single_program_holds(
    num_heads: int, num_kv_heads: int, num_slots: int, element_type: Any
) -> None:
    form = RowAttentionForm(num_heads, num_kv_heads, 16, 400, num_slots, element_type)
    assert_right(form, random_rows(form, causal([300, 0], num_slots)))


@pytest.mark.parametrize("element_type", ["float32", "float16"])
@pytest.mark.parametrize(("num_slots", "num_splits"), [(128, 1), (60, 2)])
def test_a_prompt_chunk_of_queries_that_see_less_and_less(num_slots: int, num_splits: int, element_type: Any) -> None:
    """Blocks of early queries end before the row does, and may see nothing of a split."""
    form = RowAttentionForm(2, 1, 16, 700, num_slots, element_type)
    assert RowAttentionOperation(form).num_splits == num_splits
    assert_right(form, random_rows(form, causal([0, 500], num_slots)))
    assert_right(form, random_rows(form, causal([640 - num_slots], num_slots // 2)))


EDGES = (0, 1, 31, 32, 63, 64, 65, SPLIT_POSITIONS - 1, SPLIT_POSITIONS, SPLIT_POSITIONS + 1, 2 * SPLIT_POSITIONS, 699)


@pytest.mark.parametrize("element_type", ["float32", "float16"])
def test_the_last_position_stands_at_every_edge(element_type: Any) -> None:
    form = RowAttentionForm(2, 1, 16, 700, 1, element_type)
    assert_right(form, random_rows(form, [[last] for last in EDGES]))


@pytest.mark.parametrize("element_type", ["float32", "float16"])
@pytest.mark.parametrize("lasts", [[0, 699], [255, 256, 257], [0, 0, 512], [699, 3, 300], [511, 512, 513]])
def test_the_slots_of_a_row_may_end_in_different_splits(lasts: list[int], element_type: Any) -> None:
    """A split that one slot sees all of and another nothing of."""
    form = RowAttentionForm(2, 1, 16, 700, 3, element_type)
    assert_right(form, random_rows(form, [lasts, lasts[::-1]]))


def test_a_long_row_is_shared_out_among_all_splits() -> None:
    form = RowAttentionForm(2, 1, 16, 9000, 2, "float32")
    assert RowAttentionOperation(form).num_splits == 16
    assert_right(form, random_rows(form, causal([8998, 4095, 4094], 2)))


@pytest.mark.parametrize("capacity", [1, 15, 64, 256, 257])
def test_a_row_that_is_full(capacity: int) -> None:
    form = RowAttentionForm(4, 2, 16, capacity, 1, "float16")
    assert_right(form, random_rows(form, [[capacity - 1], [0]]))


def test_a_draft_block_sees_itself_in_both_directions() -> None:
    form = RowAttentionForm(8, 4, 32, 512, 7, "bfloat16")
    assert_right(form, random_rows(form, block([0, 100, 250, 505], 7)))


def test_the_bits_of_a_row_do_not_depend_on_the_other_rows() -> None:
    form = RowAttentionForm(4, 1, 16, 2000, 4, "float16")
    limits = causal([600, 0, 1990, 255], 4)
    together = random_rows(form, limits)
    found = run(form, together)
    for row in range(len(limits)):
        alone = run(form, {name: value[row : row + 1] for name, value in together.items()})
        np.testing.assert_array_equal(alone[0], found[row])


@pytest.mark.parametrize("element_type", ["float32", "float16"])
def test_scores_of_any_size_neither_overflow_nor_vanish(element_type: Any) -> None:
    """Scores of +-1e4 and a tie of all: the softmax of the one is an argmax, of the other a mean."""
    form = RowAttentionForm(2, 1, 16, 600, 2, element_type)
    inputs = random_rows(form, causal([500, 300], 2))
    inputs["query"] = np.full_like(inputs["query"], 100)
    live = inputs["keys"][:, :, :301]
    live[:] = np.random.default_rng(1).integers(-25, 26, (2, 1, 301, 1))
    inputs["keys"][0, :, 301:502] = -25
    inputs["keys"][1, :, :302] = 3
    assert_right(form, inputs)


def test_nan_of_one_query_stays_in_it() -> None:
    form = RowAttentionForm(4, 2, 16, 300, 3, "float32")
    inputs = random_rows(form, causal([280, 5], 3))
    expected = row_attention(form, **inputs)
    inputs["query"][1, 2, 1] = np.nan
    found = run(form, inputs)
    is_nan = np.isnan(found)
    assert is_nan[1, 2, 1].all()
    assert is_nan.sum() == form.head_dim
    np.testing.assert_allclose(found[~is_nan], expected[~is_nan], atol=TOLERANCE["float32"])


def test_no_rows_need_no_launches() -> None:
    operation = RowAttentionOperation(RowAttentionForm(4, 2, 16, 300, 3, "float32"))
    assert operation.launches({"B": 0, "S": 3}) == ()
    with pytest.raises(ValueError, match="query: expected 3 slots or fewer, found 4"):
        operation.launches({"B": 1, "S": 4})


def test_forms_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads: expected a multiple of the 3 key heads, found 8"):
        RowAttentionForm(8, 3, 64, 100, 8, "float16")
    with pytest.raises(ValueError, match="expected head_dim, capacity and num_slots of 1 or more, found 64, 0 and 8"):
        RowAttentionForm(8, 4, 64, 0, 8, "float16")
