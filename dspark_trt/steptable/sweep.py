"""Times calls in rounds: every call once in each, so that a burst of other work falls on many points once.

Other work only ever adds time, and prices of drafts are small differences between calls. So a call is told from the
others by the lower quartile of its repeats, which such work disturbs least; what a typical median lies above it, over
all calls, is added to every one: prices are those of a machine as busy as this one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np

from dspark_trt.log import Progress

NUM_SWEEPS = 9
NUM_SWEEPS_IN_ANY_CASE = 5  # of these; the others only where they begin within
MORE_SWEEPS_S = 90.0
NUM_SWEEPS_OF_LONG_STEPS = 3
LONG_STEP_MS = 150.0
WARM_UP_SHARE = 1 / 3  # of a budget; what has had no turn by then is left out where it may be

Key = tuple[Literal["step", "draft", "ingest"], int, int, int]  # depth, num_requests, extra tokens | slots | tokens
Calls = Mapping[Key, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Timing:
    """The repeats of one call."""

    ms: float
    spread: float  # between the quartiles, as a share of the median
    num_repeats: int = NUM_SWEEPS


def timings(repeats: Mapping[Key, list[float]]) -> dict[Key, Timing]:
    """Of the milliseconds of every call's repeats."""
    quartiles = {key: np.quantile(times, (0.25, 0.5, 0.75)) for key, times in repeats.items()}
    above = float(np.median([median / max(low, 1e-9) for low, median, _ in quartiles.values()] or [1.0]))
    return {
        key: Timing(float(low) * above, float((high - low) / max(median, 1e-9)), len(repeats[key]))
        for key, (low, median, high) in quartiles.items()
    }


def sweep(
    calls: Calls,
    progress: Progress,
    *,
    synchronize: Callable[[], None] = lambda: None,
    num_warm_ups: int = 1,
    budget_s: float = math.inf,
    optional: Collection[Key] = frozenset(),
) -> dict[Key, Timing]:
    """Milliseconds of every call, `synchronize` included, after `num_warm_ups` that are not counted.

    budget_s: no round begins that would end behind it, but the first one that counts; while calls warm up, those of
    `optional` that have had no turn within a third of it are left out.
    """
    started = time.perf_counter()
    wanted = {**{key: call for key, call in calls.items() if key not in optional}, **calls}  # `optional` ones last
    times: dict[Key, list[float]] = {key: [] for key in wanted}
    random = Random(0)
    num_rounds, longest = num_warm_ups + NUM_SWEEPS, 0.0
    for index in range(num_rounds):
        begun = time.perf_counter()
        counted = index - num_warm_ups
        if counted > 0 and begun - started + longest > budget_s:
            break
        if counted >= NUM_SWEEPS_IN_ANY_CASE and begun - started > MORE_SWEEPS_S:
            break
        keys = list(wanted)
        if counted >= 0:  # so that no call always follows the same one, nor shares a slow moment with the same ones
            random.shuffle(keys)
        for position, key in enumerate(keys):
            if index == 0 and key in optional and time.perf_counter() - started > WARM_UP_SHARE * budget_s:
                del wanted[key]
            elif counted < NUM_SWEEPS_OF_LONG_STEPS or times[key][0] < LONG_STEP_MS:
                start = time.perf_counter()
                calls[key]()
                synchronize()
                if counted >= 0:
                    times[key].append((time.perf_counter() - start) * 1e3)
            progress((index + position / len(calls)) / num_rounds)
        longest = max(longest, time.perf_counter() - begun)
    return timings({key: times[key] for key in calls if key in wanted})
