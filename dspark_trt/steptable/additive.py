"""A step table as one sum, T = bias + alpha(requests) + theta(tokens), which is how other engines price a step.

Shape letters: `C` cells, `R` request probes, `M` token probes. All times are milliseconds.

They price the whole step: the target's call, the drafter's block and what runs outside the engines. Both terms are read
by linear interpolation between probes and stay at the outermost ones beyond. The sum is fitted to what our table says,
every cell by its relative error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import RecipeError
from dspark_trt.steptable.table import StepTable, isotonic

Floats = NDArray[np.float64]

MAX_REQUESTS = 64  # request counts at which the table is asked: more are thinned out
PROBE_RATIO = 1.25  # token probes stand apart by this factor at least, where prices are no stairs
FLAT = 0.02  # theta that changes a step by less tells nothing of tokens: other engines then verify everything
_LEAST_MS = 1e-6  # their readers want times above 0


@dataclass(frozen=True, slots=True)
class AdditiveCost:
    """T = bias_ms + alpha_ms(requests) + theta_ms(tokens); tokens of a step: one and its drafts for each request."""

    bias_ms: float  # > 0
    num_requests: tuple[int, ...]  # R, ascending
    alpha_ms: tuple[float, ...]  # [R], >= 0
    batch_tokens: tuple[int, ...]  # M, ascending, at least two
    theta_ms: tuple[float, ...]  # [M], > 0, never falling, towards 0 at no tokens

    def step_ms(self, num_requests: Floats, batch_tokens: Floats) -> Floats:
        alpha = np.interp(num_requests, self.num_requests, self.alpha_ms)
        theta = np.interp(batch_tokens, self.batch_tokens, self.theta_ms)
        return np.asarray(self.bias_ms + alpha + theta, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class AdditiveFit:
    """The sum and how far it is from the table it was fitted to."""

    cost: AdditiveCost
    num_cells: int
    median_error: float  # relative
    max_error: float
    worst: tuple[int, int]  # requests and tokens of the largest error
    is_flat: bool  # tokens hardly change the time of a step


def fit_additive(table: StepTable, *, gamma: int, context_tokens: float, ingested_tokens: float) -> AdditiveFit:
    """Fit the sum to steps that draft gamma slots and verify 0 .. gamma drafts of each request.

    Args:
        context_tokens: positions that a request holds; the sum has no such axis.
        ingested_tokens: tokens a request and step by which the drafter's context is brought up, at least 1.

    Raises RecipeError when the table holds a single token count.
    """
    token_probes = _token_probes(table, gamma)
    requests, tokens, times = _cells(table, token_probes, gamma, context_tokens, ingested_tokens)
    if len(token_probes) < 2:
        raise RecipeError(
            "step table: expected at least two token counts to price, found one; raise --max-batch-tokens"
        )
    request_probes = _both_ends({1, *table.num_requests}, table)
    cost = _fit(requests, tokens, times, request_probes, token_probes)
    errors = np.abs(cost.step_ms(requests, tokens) / times - 1)
    at = int(errors.argmax())
    rise = cost.theta_ms[-1] - cost.theta_ms[0]
    return AdditiveFit(
        cost=cost,
        num_cells=len(times),
        median_error=float(np.median(errors)),
        max_error=float(errors[at]),
        worst=(int(requests[at]), int(tokens[at])),
        is_flat=bool(rise < FLAT * times.min()),
    )


def _cells(
    table: StepTable, token_probes: Sequence[int], gamma: int, context_tokens: float, ingested_tokens: float
) -> tuple[Floats, Floats, Floats]:
    """Requests, tokens and milliseconds of the steps looked at, each [C].

    For every request count the same number of drafts for each request, and every token probe in between.
    """
    most = table.num_requests[-1]
    counts = sorted({*np.linspace(1, most, min(most, MAX_REQUESTS)).round().astype(int).tolist(), *table.num_requests})
    requests, tokens, times = [], [], []
    for count in counts:
        drafting = (
            table.draft_cost(count, gamma, context_tokens)
            + table.ingest_cost(round(count * ingested_tokens))
            + table.host_cost(count, is_drafting=True)
        )
        extra = {count * drafts for drafts in range(gamma + 1)}
        extra |= {probe - count for probe in token_probes if 0 <= probe - count <= gamma * count}
        curve = table.step_curve(count, context_tokens, 0, gamma * count) + drafting
        requests += [count] * len(extra)
        tokens += [count + each for each in sorted(extra)]
        times += curve[sorted(extra)].tolist()
    return np.array(requests, np.float64), np.array(tokens, np.float64), np.array(times)


def _token_probes(table: StepTable, gamma: int) -> list[int]:
    """Where theta bends."""
    last = table.num_requests[-1] * (gamma + 1)
    measured = {count + extra for count in table.num_requests for extra in table.extra_tokens if extra <= gamma * count}
    if table.is_padded:
        return _both_ends({1, last, *measured}, table)
    probes = [1]
    for each in sorted({*measured, last}):
        if each == last or each >= probes[-1] * PROBE_RATIO:
            probes.append(each)
    return sorted(set(probes))


def _both_ends(sizes: set[int], table: StepTable) -> list[int]:
    """Sizes as probes; where calls are padded to them the next size, too: readers that interpolate then see stairs."""
    return sorted(sizes | ({each + 1 for each in sizes if each < max(sizes)} if table.is_padded else set()))


def _fit(
    requests: Floats, tokens: Floats, times: Floats, request_probes: Sequence[int], token_probes: Sequence[int]
) -> AdditiveCost:
    of_requests, of_tokens = _hats(requests, request_probes), _hats(tokens, token_probes)
    weights = 1 / times
    both = np.concatenate((of_requests, of_tokens), axis=1) * weights[:, None]
    solution = np.linalg.lstsq(both, times * weights, rcond=None)[0]
    theta = np.array(isotonic(solution[len(request_probes) :].tolist()))
    theta -= theta[0]
    rest = times - of_tokens @ theta
    alpha = np.linalg.lstsq(of_requests * weights[:, None], rest * weights, rcond=None)[0]
    alpha = np.maximum(alpha, 2 * _LEAST_MS)
    # what one more token costs at the left end is taken for every token before it, as far as alpha holds so much
    slope = (theta[1] - theta[0]) / (token_probes[1] - token_probes[0])
    shift = float(np.clip(slope * token_probes[0], _LEAST_MS, alpha.min() / 2))
    alpha -= shift
    bias = float(alpha.min())
    return AdditiveCost(
        bias_ms=bias,
        num_requests=tuple(request_probes),
        alpha_ms=tuple(np.maximum(alpha - bias, 0.0).tolist()),
        batch_tokens=tuple(token_probes),
        theta_ms=tuple((theta + shift).tolist()),
    )


def _hats(at: Floats, probes: Sequence[int]) -> Floats:
    """Shares of the probes in a linear interpolation at `at`, [C, probes]."""
    return np.stack([np.interp(at, probes, row) for row in np.eye(len(probes))], axis=1)
