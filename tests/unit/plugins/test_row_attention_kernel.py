"""The Triton kernels of RowAttention, under Triton's CPU interpreter, against the reference.

Every tensor stands in a larger allocation full of NaN; every page that is not a row's own holds NaN or Inf, and so does
everything behind a row's last query.
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
from tests.support.row_attention_cases import TOLERANCE, Arrays, Rows, attention_form, random_call

ELEMENT_TYPES = tuple(TOLERANCE)
alike = Rows.alike


def run(form: RowAttentionForm, inputs: Arrays) -> np.ndarray[Any, Any]:
    return run_interpreted(RowAttentionOperation(form), inputs)["attended"]


def assert_right(form: RowAttentionForm, inputs: Arrays) -> np.ndarray[Any, Any]:
    found = run(form, inputs)
    expected = row_attention(form, **inputs)
    num_tokens = int(inputs["query_lengths"].sum())
    assert np.isfinite(expected).all()
    tolerance = TOLERANCE[form.element_type]
    np.testing.assert_allclose(found[:num_tokens].astype(np.float32), expected[:num_tokens], rtol=0, atol=tolerance)
    assert np.isnan(found[num_tokens:].astype(np.float32)).all(), "nobody writes the tokens of no row"
    return found


@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(8, 2, 32), (9, 3, 64), (3, 3, 32), (6, 1, 16), (10, 1, 80), (3, 1, 96), (4, 2, 8), (4, 1, 128)],
)
def test_every_grouping_of_heads_and_every_type(
    num_heads: int, num_kv_heads: int, head_dim: int, element_type: Any
) -> None:
    form = attention_form(num_heads, num_kv_heads, head_dim, 400, 6, element_type)
    assert_right(form, random_call(form, Rows([70, 0, 300], [6, 2, 5], 6), num_padding=3))


@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
@pytest.mark.parametrize("num_slots", range(1, 9))
def test_every_length_of_a_query(num_slots: int, element_type: Any) -> None:
    form = attention_form(4, 1, 32, 300, 8, element_type)
    assert_right(form, random_call(form, alike([280, 17], num_slots)))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_slots"), [(16, 1, 8), (3, 1, 23), (1, 1, 70)])
@pytest.mark.parametrize("element_type", ["float32", "float16"])
def test_queries_of_a_key_head_that_no_single_program_holds(
    num_heads: int, num_kv_heads: int, num_slots: int, element_type: Any
) -> None:
    form = attention_form(num_heads, num_kv_heads, 16, 400, num_slots, element_type)
    assert_right(form, random_call(form, alike([300, 0], num_slots)))


@pytest.mark.parametrize("element_type", ["float32", "float16"])
def test_rows_that_verify_and_chunks_of_other_lengths_are_one_call(element_type: Any) -> None:
    """Blocks of a chunk's early queries end before the row does, and may see nothing of a split."""
    form = attention_form(2, 1, 16, 768, 3, element_type, num_chunk_slots=128)
    assert RowAttentionOperation(form).splits(3, 128).count == 3
    chunks = Rows([0, 512, 600], [128, 60, 1], 128)
    assert_right(form, random_call(form, Rows([511, 3, 766], [2, 0, 1], 3), chunks, num_padding=5))
    assert_right(form, random_call(form, Rows([0], [0], 1), chunks))
    assert_right(form, random_call(form, alike([100, 700], 3), Rows([0], [0], 1)))


SPLIT_OF_704 = 384  # positions
EDGES = (0, 1, 31, 32, 63, 64, 65, 255, 256, SPLIT_OF_704 - 1, SPLIT_OF_704, SPLIT_OF_704 + 1, 703)


@pytest.mark.parametrize("element_type", ["float32", "float16"])
def test_the_last_position_stands_at_every_edge(element_type: Any) -> None:
    form = attention_form(2, 1, 16, 704, 1, element_type)
    assert RowAttentionOperation(form).splits(len(EDGES), 1) == Splits(2, SPLIT_OF_704)
    assert_right(form, random_call(form, alike(EDGES, 1)))


def test_a_long_row_is_shared_out_among_all_splits() -> None:
    form = attention_form(2, 1, 16, 9024, 2, "float32")
    assert RowAttentionOperation(form).splits(3, 2) == Splits(MAX_SPLITS, 384)
    assert_right(form, random_call(form, alike([9022, 4095, 4094], 2)))


@pytest.mark.parametrize("capacity", [64, 256, 320])
def test_a_row_that_is_full(capacity: int) -> None:
    form = attention_form(4, 2, 16, capacity, 1, "float16")
    assert_right(form, random_call(form, alike([capacity - 1, 0], 1)))


def test_a_draft_block_sees_itself_in_both_directions() -> None:
    form = attention_form(8, 4, 32, 512, 7, "bfloat16", is_causal=False)
    assert_right(form, random_call(form, alike([0, 100, 250, 505], 7)))


def test_the_bits_of_a_row_do_not_depend_on_what_other_rows_hold_nor_on_where_its_pages_are() -> None:
    form = attention_form(4, 1, 16, 2048, 4, "float16")
    found = run(form, call := random_call(form, alike([600, 0, 1990], 4)))
    other = random_call(form, alike([600, 40, 7], 4), seed=1)
    count = -(-604 // form.page_positions)
    free = np.setdiff1d(np.arange(1, len(other["pages"])), other["block_tables"])[:count]
    other["pages"][free] = call["pages"][call["block_tables"][0, :count]]
    other["block_tables"][0, :count] = free
    other["query"][:4] = call["query"][:4]
    np.testing.assert_array_equal(run(form, other)[:4], found[:4])


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
    operation = RowAttentionOperation(attention_form(*QWEN3_8B, 4608, 512, "bfloat16"))
    splits = operation.splits(num_rows, num_slots)
    assert splits.count == count
    launches = operation.launches({"T": 1, "D": num_rows, "S": num_slots})
    assert [launch.kernel.rpartition("_")[0] for launch in launches] == ["attend_split", "combine"][: 1 + (count > 1)]
    programs = launches[0].grid[0]
    assert programs * count <= 2 * WANTED_PROGRAMS or count == 1
    assert splits.positions * count >= 4608


@pytest.mark.parametrize("capacity", [100, 4608, 16896, 131072])
@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
def test_what_splits_leave_fits_the_workspace_of_every_call(capacity: int, element_type: Any) -> None:
    operation = RowAttentionOperation(attention_form(*QWEN3_8B, capacity, 512, element_type, num_chunk_slots=512))
    places = {tensor.name: tensor.shape for tensor in operation.workspace}
    _, num_bytes = workspace_offsets(operation.workspace, {})
    for num_rows in (1, 2, 3, 5, 8, 16, 31, 32, 64, 100, 256):
        for num_slots in (1, 2, 8, 16, 31, 64, 100, 512):
            extents = {"T": num_rows * num_slots, "D": num_rows, "S": num_slots, "E": num_rows, "X": num_slots}
            for launch in operation.launches(extents):
                if launch.kernel == "combine_splits":
                    assert launch.grid[0] * launch.scalars["num_splits"] <= int(places["maxima"][0])
    assert num_bytes < (300 << 20)
    assert (num_bytes == 0) == (capacity < 2 * SHORTEST_SPLIT)


def test_a_row_that_one_split_holds_leaves_no_parts_and_a_longer_one_does() -> None:
    """What is not written is not read either: the workspace holds NaN."""
    form = attention_form(2, 1, 16, 704, 2, "float32")
    operation = RowAttentionOperation(form)
    assert operation.splits(2, 2) == Splits(2, SPLIT_OF_704)
    short = random_call(form, alike([SPLIT_OF_704 - 2, 3], 2))
    assert_right(form, short)
    assert parts_left(operation, short) == 0
    assert parts_left(operation, random_call(form, alike([SPLIT_OF_704 - 1, 3], 2))) == 2 * 2 * 2


def parts_left(operation: RowAttentionOperation, inputs: Arrays) -> int:
    """Parts that a call left: sums that were written."""
    sums = run_interpreted(operation, inputs, with_workspace=True)["sums"]
    return int(np.isfinite(sums).sum())


def test_a_long_row_among_many_is_split_so_that_it_does_not_keep_them_waiting() -> None:
    operation = RowAttentionOperation(attention_form(*QWEN3_8B, 16896, 8, "bfloat16"))
    assert operation.splits(32, 8) == Splits(4, 4224)


@pytest.mark.parametrize("element_type", ["float32", "float16"])
def test_scores_of_any_size_neither_overflow_nor_vanish(element_type: Any) -> None:
    """Scores of +-1e4 and a tie of all: the softmax of the one is an argmax, of the other a mean."""
    form = attention_form(2, 1, 16, 600, 2, element_type)
    inputs = random_call(form, alike([500, 300], 2))
    inputs["query"] = np.full_like(inputs["query"], 100)
    random = np.random.default_rng(1)
    for row, num_live in enumerate((502, 302)):
        for at in range(num_live):
            key = random.integers(-25, 26) if row == 0 and at < 301 else -25 if row == 0 else 3
            page = inputs["block_tables"][row, at // form.page_positions]
            inputs["pages"][page, 0, 0, at % form.page_positions] = key
    assert_right(form, inputs)


def test_nan_of_one_query_stays_in_it() -> None:
    form = attention_form(4, 2, 16, 300, 3, "float32")
    inputs = random_call(form, alike([280, 5], 3))
    expected = row_attention(form, **inputs)
    inputs["query"][4, 2 * 16 : 3 * 16] = np.nan
    found = run(form, inputs)
    is_nan = np.isnan(found)
    assert is_nan[4, 2 * 16 : 3 * 16].all()
    assert is_nan.sum() == form.head_dim
    np.testing.assert_allclose(found[~is_nan], expected[~is_nan], atol=TOLERANCE["float32"])


def test_no_rows_need_no_launches() -> None:
    operation = RowAttentionOperation(attention_form(4, 2, 16, 300, 3, "float32"))
    assert operation.launches({"T": 0, "D": 0, "S": 3}) == ()
    with pytest.raises(ValueError, match="query: expected 3 slots or fewer, found 4"):
        operation.launches({"T": 4, "D": 1, "S": 4})


def test_forms_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads: expected a multiple of the 3 key heads, found 8"):
        attention_form(8, 3, 64, 100, 8, "float16")
    with pytest.raises(ValueError, match=r"table_width and num_slots of 1 or more .*, found 64, 0, 8 and 0"):
        attention_form(8, 4, 64, 0, 8, "float16")
    with pytest.raises(ValueError, match="page_positions: expected a power of two from 16 on, found 48"):
        RowAttentionForm(8, 4, 64, 48, 4, 8, 0, True, "float16")
