"""What a load did to the steps of a server, from its metrics before and behind it."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

_SAMPLE = re.compile(r"(dspark_\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_BOUND = re.compile(r'le="([^"]*)"')
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own server is behind no proxy
_TIMEOUT_S = 10.0
_ERRORS = "dspark_step_price_error_ratio_bucket"
_DECODING = "dspark_verify_len_count"
_NOT_DRAFTING = "dspark_steps_without_drafts_total"


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counters at one time."""

    errors: tuple[tuple[float, float], ...]  # upper bound of a bucket, priced steps up to it
    num_decoding: float  # steps in which requests decoded
    num_not_drafting: float  # of these, none drafted


def read_step_counts(metrics_url: str) -> StepCounts:
    """Raises OSError."""
    with _DIRECT.open(metrics_url, timeout=_TIMEOUT_S) as answer:
        return step_counts(answer.read().decode())


def step_counts(text: str) -> StepCounts:
    """From Triton's metrics page; what it does not have is 0."""
    found = {_DECODING: 0.0, _NOT_DRAFTING: 0.0}
    errors = []
    for name, labels, value in _SAMPLE.findall(text):
        if name == _ERRORS and (bound := _BOUND.search(labels)):
            errors.append((float(bound[1]), float(value)))
        elif name in found:
            found[name] = float(value)
    return StepCounts(tuple(sorted(errors)), found[_DECODING], found[_NOT_DRAFTING])


def price_errors(before: StepCounts, behind: StepCounts) -> tuple[float, ...]:
    """Of the steps in between, those of a bucket evenly over it: quantiles are exact to its width."""
    known = dict(before.errors)
    errors: list[float] = []
    low = num_below = 0.0
    for bound, count in behind.errors:
        up_to = count - known.get(bound, 0.0)
        num_here = round(up_to - num_below)
        width = bound - low if bound != float("inf") else 0.0
        errors += [low + width * (at + 0.5) / num_here for at in range(num_here)]
        low, num_below = (bound if width else low), up_to
    return tuple(errors)


def steps_not_drafting(before: StepCounts, behind: StepCounts) -> float | None:
    """Share of the steps in between in which requests decoded; None where there were none."""
    num_steps = behind.num_decoding - before.num_decoding
    return (behind.num_not_drafting - before.num_not_drafting) / num_steps if num_steps else None
