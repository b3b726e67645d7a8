"""A step table as a sum of two terms: exact where it is one, honest where it is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.errors import RecipeError
from dspark_trt.steptable.additive import AdditiveFit, fit_additive
from dspark_trt.steptable.table import StepTable

GAMMA = 4
COUNTS = (1, 2, 4, 8)
EXTRA = tuple(range(GAMMA * COUNTS[-1] + 1))


def table_of(
    step_ms: Callable[[int, int], float], extra: tuple[int, ...] = EXTRA, *, is_padded: bool = False
) -> StepTable:
    """step_ms: of requests and extra tokens, the drafter's 1 ms and 0.5 ms a request not counted."""
    return StepTable(
        num_requests=COUNTS,
        extra_tokens=extra,
        step_ms=(tuple(tuple(step_ms(count, more) for more in extra) for count in COUNTS),),
        draft_ms=(tuple((0.5, 1.0 + 0.5 * count) for count in COUNTS),),
        num_slots=(1, GAMMA),
        host_ms=(0.25,) * len(COUNTS),
        drafting_host_ms=(0.25,) * len(COUNTS),
        is_padded=is_padded,
    )


def fitted(table: StepTable) -> AdditiveFit:
    return fit_additive(table, gamma=GAMMA, context_tokens=128, ingested_tokens=1.5)


def test_sum_is_found_again_with_the_drafter_and_the_host_inside() -> None:
    fit = fitted(table_of(lambda count, extra: 10 + 0.3 * count + 0.2 * (count + extra)))
    assert fit.max_error < 1e-6
    counts, tokens = np.array([1.0, 2, 4, 8, 8]), np.array([3.0, 10, 4, 8, 40])
    expected = 10 + 0.3 * counts + 0.2 * tokens + 1.0 + 0.5 * counts + 0.5
    np.testing.assert_allclose(fit.cost.step_ms(counts, tokens), expected, rtol=1e-6)
    assert not fit.is_flat


def test_theta_goes_to_zero_where_there_are_no_tokens() -> None:
    cost = fitted(table_of(lambda count, extra: 10 + 0.2 * (count + extra))).cost
    assert cost.batch_tokens[0] == 1
    assert cost.theta_ms[0] == pytest.approx(0.2)


def test_error_says_how_far_from_a_sum_the_table_is_and_where() -> None:
    fit = fitted(table_of(lambda count, extra: 10 + 0.02 * count * extra))
    assert fit.max_error > 0.02 > 0.01 > fit.median_error
    counts = np.array([fit.worst[0]], dtype=float)
    tokens = np.array([fit.worst[1]], dtype=float)
    truth = 10 + 0.02 * counts * (tokens - counts) + 1.5 + 0.5 * counts
    assert abs(fit.cost.step_ms(counts, tokens) / truth - 1)[0] == pytest.approx(fit.max_error)


def test_stairs_keep_both_ends_so_that_readers_that_interpolate_see_them() -> None:
    """Calls padded to 8, 16, 32 and 64 tokens."""

    def step_ms(count: int, extra: int) -> float:
        return 10.0 * 2 ** max(0, (count + extra - 1).bit_length() - 3)

    extra = tuple(sorted({0, *(size - count for size in (8, 16, 32, 64) for count in COUNTS if size >= count)}))
    extra = tuple(each for each in extra if each <= GAMMA * COUNTS[-1])
    fit = fitted(table_of(step_ms, extra, is_padded=True))
    edges = zip(fit.cost.batch_tokens, itertools.pairwise(fit.cost.theta_ms), strict=False)
    jumps = [tokens for tokens, (low, high) in edges if high - low > 5]
    assert jumps == [8, 16, 32]
    assert {9, 17, 33} <= set(fit.cost.batch_tokens)
    assert fit.max_error < 0.05


def test_table_that_tokens_do_not_change_is_called_flat() -> None:
    assert fitted(table_of(lambda count, extra: 10 + 0.3 * count)).is_flat


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_any_table_gives_a_sum_that_other_engines_accept(seed: int) -> None:
    random = np.random.default_rng(seed)
    fit = fitted(table_of(lambda count, extra: float(random.uniform(0.01, 100))))
    cost = fit.cost
    assert cost.bias_ms > 0
    assert min(cost.alpha_ms) >= 0
    assert min(cost.theta_ms) > 0
    assert list(cost.theta_ms) == sorted(cost.theta_ms)
    for probes, values in ((cost.num_requests, cost.alpha_ms), (cost.batch_tokens, cost.theta_ms)):
        assert len(probes) == len(values) >= 2
        assert list(probes) == sorted(set(probes))
    assert np.isfinite([cost.bias_ms, *cost.alpha_ms, *cost.theta_ms, fit.max_error]).all()


def test_table_of_a_single_token_count_is_refused() -> None:
    table = StepTable(num_requests=(1,), extra_tokens=(0,), step_ms=(((5.0,),),), draft_ms=(((1.0,),),))
    with pytest.raises(RecipeError, match="at least two token counts"):
        fit_additive(table, gamma=0, context_tokens=1, ingested_tokens=1)
