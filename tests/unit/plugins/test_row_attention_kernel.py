"""The Triton kernels of RowAttention, under Triton's CPU interpreter, against the reference.

Every tensor stands in a larger allocation full of NaN, and caches hold NaN and Inf behind the last live position of
each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dspark_trt_plugins.operation import workspace_offsets
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.launches import (
    MAX_SPLITS,
    SHORTEST_SPLIT,
    WANTED_PROGRAMS,
    RowAttentionOperation,
    Splits,
)
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
@pytest.mark.parametrize("num_slots", [128, 60])
def test_a_prompt_chunk_of_queries_that_see_less_and_less(num_slots: int, element_type: Any) -> None:
    """Blocks of early queries end before the row does, and may see nothing of a split."""
    form = RowAttentionForm(2, 1, 16, 700, num_slots, element_type)
    assert RowAttentionOperation(form).splits(2, num_slots).count == 2
    assert_right(form, random_rows(form, causal([0, 500], num_slots)))
    assert_right(form, random_rows(form, causal([640 - num_slots], num_slots // 2)))


SPLIT_OF_700 = 384  # positions
EDGES = (0, 1, 31, 32, 63, 64, 65, 255, 256, SPLIT_OF_700 - 1, SPLIT_OF_700, SPLIT_OF_700 + 1, 699)


@pytest.mark.parametrize("element_type", ["float32", "float16"])
def test_the_last_position_stands_at_every_edge(element_type: Any) -> None:
    form = RowAttentionForm(2, 1, 16, 700, 1, element_type)
    assert RowAttentionOperation(form).splits(len(EDGES), 1) == Splits(2, SPLIT_OF_700)
    assert_right(form, random_rows(form, [[last] for last in EDGES]))


@pytest.mark.parametrize("element_type", ["float32", "float16"])
@pytest.mark.parametrize("lasts", [[0, 699], [383, 384, 385], [0, 0, 512], [699, 3, 300], [511, 512, 513]])
def test_the_slots_of_a_row_may_end_in_different_splits(lasts: list[int], element_type: Any) -> None:
    """A split that one slot sees all of and another nothing of."""
    form = RowAttentionForm(2, 1, 16, 700, 3, element_type)
    assert_right(form, random_rows(form, [lasts, lasts[::-1]]))


def test_a_long_row_is_shared_out_among_all_splits() -> None:
    form = RowAttentionForm(2, 1, 16, 9000, 2, "float32")
    assert RowAttentionOperation(form).splits(3, 2) == Splits(MAX_SPLITS, 384)
    assert_right(form, random_rows(form, causal([8998, 4095, 4094], 2)))


@pytest.mark.parametrize("capacity", [1, 15, 64, 256, 257])
def test_a_row_that_is_full(capacity: int) -> None:
    form = RowAttentionForm(4, 2, 16, capacity, 1, "float16")
    assert_right(form, random_rows(form, [[capacity - 1], [0]]))


def test_a_draft_block_sees_itself_in_both_directions() -> None:
    form = RowAttentionForm(8, 4, 32, 512, 7, "bfloat16")
    assert_right(form, random_rows(form, block([0, 100, 250, 505], 7)))


def test_the_bits_of_a_row_do_not_depend_on_what_the_other_rows_hold() -> None:
    form = RowAttentionForm(4, 1, 16, 2000, 4, "float16")
    rows, others = (random_rows(form, causal(past, 4), seed) for seed, past in ((0, [600, 0, 1990]), (1, [5, 1300, 0])))
    found = run(form, rows)
    for row in range(3):
        mixed = {name: value.copy() for name, value in others.items()}
        for name, value in mixed.items():
            value[row] = rows[name][row]
        np.testing.assert_array_equal(run(form, mixed)[row], found[row])


QWEN3_8B = (32, 8, 128)


@pytest.mark.parametrize(
    ("num_rows", "num_slots", "count"),
    [
        (1, 8, 18),  # 8 programs: as many splits as there are 256 positions
        (4, 8, 8),
        (8, 8, 4),
        (32, 8, 1),  # 256 programs fill the device
        (1, 16, 18),  # a short chunk behind a long context
        (1, 64, 8),
        (1, 512, 1),  # a whole prompt chunk
        (64, 8, 1),
    ],
)
def test_splits_are_chosen_by_rows_heads_queries_and_length(num_rows: int, num_slots: int, count: int) -> None:
    operation = RowAttentionOperation(RowAttentionForm(*QWEN3_8B, 4608, 512, "bfloat16"))
    splits = operation.splits(num_rows, num_slots)
    assert splits.count == count
    launches = operation.launches({"B": num_rows, "S": num_slots})
    assert [launch.kernel.rpartition("_")[0] for launch in launches] == ["attend_split", "combine"][: 1 + (count > 1)]
    programs = launches[0].grid[0]
    assert programs * count <= 2 * WANTED_PROGRAMS or count == 1
    assert splits.positions * count >= 4608


@pytest.mark.parametrize("capacity", [100, 4608, 16896, 131072])
@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
def test_what_splits_leave_fits_the_workspace_of_every_call(capacity: int, element_type: Any) -> None:
    operation = RowAttentionOperation(RowAttentionForm(*QWEN3_8B, capacity, 512, element_type))
    places = {tensor.name: tensor.shape for tensor in operation.workspace}
    _, num_bytes = workspace_offsets(operation.workspace, {})
    for num_rows in (1, 2, 3, 5, 8, 16, 31, 32, 64, 100, 256):
        for num_slots in (1, 2, 8, 16, 31, 64, 100, 512):
            count = operation.splits(num_rows, num_slots).count
            if count > 1:
                assert num_rows * 32 * num_slots * count <= int(places["maxima"][0])
    assert num_bytes < (300 << 20)
    assert (num_bytes == 0) == (capacity < 2 * SHORTEST_SPLIT)


def test_a_row_that_one_split_holds_leaves_no_parts_and_a_longer_one_does() -> None:
    """What is not written is not read either: the workspace holds NaN."""
    form = RowAttentionForm(2, 1, 16, 700, 2, "float32")
    operation = RowAttentionOperation(form)
    assert operation.splits(2, 2) == Splits(2, SPLIT_OF_700)
    short = random_rows(form, causal([SPLIT_OF_700 - 2, 3], 2))
    assert_right(form, short)
    assert parts_left(operation, short) == 0
    assert parts_left(operation, random_rows(form, causal([SPLIT_OF_700 - 1, 3], 2))) == 2 * 2 * 2


def parts_left(operation: RowAttentionOperation, inputs: Arrays) -> int:
    """Parts that a call left: sums that were written."""
    sums = run_interpreted(operation, inputs, with_workspace=True)["sums"]
    return int(np.isfinite(sums).sum())


def test_a_long_row_among_many_is_split_so_that_it_does_not_keep_them_waiting() -> None:
    operation = RowAttentionOperation(RowAttentionForm(*QWEN3_8B, 16896, 8, "bfloat16"))
    assert operation.splits(32, 8) == Splits(4, 4224)


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
