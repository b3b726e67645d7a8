"""What top_k, top_p and min_p cut off a distribution, many rows at once.

Shape letters: `A` rows, `V` vocabulary. On a device the host waits twice for all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace, device, is_numpy_namespace

from dspark_trt.runtime.arrays import index_array, largest, largest_above
from dspark_trt.runtime.request import SamplingParams

Array = Any  # of the engine's library

MAX_FLOOR = 0.5  # the most probable token has weight 1 and is never below the floor, however small top_p is


def truncate(weights: Array, params: Sequence[SamplingParams | None]) -> None:
    """top_k, top_p, min_p on softmax weights [A, V] whose largest are 1, in place: what is cut gets weight 0.

    params [A]; None: the row is left alone.
    """
    # a row of a host's array stays in its cache while it is worked on; a device rather gets all rows in one call
    rows_at_once = 1 if is_numpy_namespace(array_namespace(weights)) else len(params)
    for first in range(0, len(params), rows_at_once):
        _truncate_rows(weights[first : first + rows_at_once, :], params[first : first + rows_at_once])


def _truncate_rows(weights: Array, params: Sequence[SamplingParams | None]) -> None:
    vocab_size = weights.shape[-1]
    rows = [(row, each) for row, each in enumerate(params) if each is not None]
    _cut(_keep_top_k, weights, {row: each.top_k for row, each in rows if 0 < each.top_k < vocab_size})
    _cut(_keep_top_p, weights, {row: each.top_p for row, each in rows if each.top_p < 1.0})
    _cut(_keep_min_p, weights, {row: each.min_p for row, each in rows if each.min_p > 0.0})


def _cut(keep: Any, weights: Array, limits: dict[int, Any]) -> None:
    """Apply one processor to the rows that have a limit, in place."""
    if len(limits) == len(weights):
        keep(weights, list(limits.values()))
    elif limits:
        rows = index_array(list(limits), weights)
        chosen = weights[rows, :]
        keep(chosen, list(limits.values()))
        weights[rows, :] = chosen


def _keep_top_k(weights: Array, top_k: Sequence[int]) -> None:
    """Weights below the k-th largest are cut; what equals it stays."""
    xp = array_namespace(weights)
    ordered = largest(weights, max(top_k))
    if len(set(top_k)) > 1:
        is_behind = xp.arange(ordered.shape[-1], device=device(weights)) >= _column(top_k, weights, xp.int64)
        ordered = xp.where(is_behind, 1.0, ordered)
    smallest = xp.min(ordered, axis=-1, keepdims=True)
    weights[:] = xp.where(weights < smallest, 0.0, weights)


def _keep_top_p(weights: Array, top_p: Sequence[float]) -> None:
    """Tokens are kept from the most probable on until top_p is reached, the one that reaches it too; ties by id."""
    xp = array_namespace(weights)
    total = xp.sum(weights, axis=-1, keepdims=True)
    # all tokens up to this weight together have at most the mass 1 - top_p: none of them can be kept
    floor = total * _column([(1.0 - each) / weights.shape[-1] for each in top_p], weights)
    floor = xp.where(floor < MAX_FLOOR, floor, MAX_FLOOR)
    ordered = largest_above(weights, floor)
    mass_before = xp.cumulative_sum(ordered, axis=-1, dtype=xp.float64) - ordered
    is_kept = (mass_before < total * _column(top_p, weights)) & (ordered > floor)
    is_kept[:, 0] = True
    smallest = xp.min(xp.where(is_kept, ordered, 1.0), axis=-1, keepdims=True)
    weights[:] = xp.where(weights < smallest, 0.0, weights)
    if xp.any((ordered >= smallest) & ~is_kept):
        num_ties_kept = xp.count_nonzero(is_kept & (ordered == smallest), axis=-1, keepdims=True)
        is_tie = weights == smallest
        rank = xp.cumulative_sum(is_tie, axis=-1, dtype=xp.int64)
        weights[:] = xp.where(is_tie & (rank > num_ties_kept), 0.0, weights)


def _keep_min_p(weights: Array, min_p: Sequence[float]) -> None:
    """The most probable token has weight 1."""
    weights[:] = array_namespace(weights).where(weights < _column(min_p, weights), 0.0, weights)


def _column(values: Sequence[float], like: Array, dtype: Any = None) -> Array:
    xp = array_namespace(like)
    return xp.asarray([[each] for each in values], dtype=dtype or like.dtype, device=device(like))
