"""Index tensors of row groups, for any segments: every token finds its padded query, and its output finds the token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dspark_trt.engines.row_groups import positions, row_group


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    rows = draw(st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True))
    past = [draw(st.integers(0, 50)) for _ in rows]
    query = [draw(st.integers(1, 9)) for _ in rows]
    return rows, past, query


@given(segments(), st.integers(0, 20))
def test_tokens_and_padded_indices_are_inverse_and_idle_rows_are_empty(
    drawn: tuple[list[int], list[int], list[int]], first_token: int
) -> None:
    rows, past, query = (np.array(values) for values in drawn)
    group = row_group(rows, past, query, first_token=first_token)
    assert group.tokens.shape == (rows.max() - rows.min() + 1, query.max())
    flat = group.tokens.reshape(-1)
    np.testing.assert_array_equal(flat[group.padded_indices], first_token + np.arange(query.sum()))
    begin = 0
    for row, start, length in zip(rows, past, query, strict=True):
        at = row - group.first_row
        assert group.past_lengths[at] == start
        assert group.query_lengths[at] == length
        np.testing.assert_array_equal(group.tokens[at, :length], first_token + begin + np.arange(length))
        assert (group.tokens[at, length:] == first_token + begin + length - 1).all(), "padding is of the row's own"
        begin += length
    idle = np.setdiff1d(np.arange(group.num_rows), rows - group.first_row)
    assert not group.past_lengths[idle].any()
    assert not group.query_lengths[idle].any()
    expected = np.concatenate([start + np.arange(length) for start, length in zip(past, query, strict=True)])
    np.testing.assert_array_equal(positions(past, query), expected)


@given(segments(), st.integers(0, 20), st.integers(0, 5), st.integers(0, 9))
def test_a_padded_group_holds_the_same_in_a_range_from_row_0(
    drawn: tuple[list[int], list[int], list[int]], first_token: int, more_rows: int, more_queries: int
) -> None:
    rows, past, query = (np.array(values) for values in drawn)
    shape = (int(rows.max()) + 1 + more_rows, int(query.max()) + more_queries)
    group = row_group(rows, past, query, first_token=first_token, padded_to=shape)
    assert (group.first_row, group.tokens.shape) == (0, shape)
    np.testing.assert_array_equal(group.tokens.reshape(-1)[group.padded_indices], first_token + np.arange(query.sum()))
    np.testing.assert_array_equal(group.past_lengths[rows], past)
    np.testing.assert_array_equal(group.query_lengths[rows], query)
    idle = np.setdiff1d(np.arange(shape[0]), rows)
    assert not group.query_lengths[idle].any()
    assert not group.past_lengths[idle].any()


def test_a_group_without_segments_is_one_row_without_tokens() -> None:
    none = np.empty(0, np.int64)
    group = row_group(none, none, none)
    assert group.tokens.shape == (1, 1)
    assert group.query_lengths.tolist() == [0]
    assert group.padded_indices.size == 0
