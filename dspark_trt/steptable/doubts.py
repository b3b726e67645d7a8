"""What speaks against a measured table: curves that fall, repeats that differ, and other work on the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dspark_trt.machine.load import Load
from dspark_trt.steptable.sweep import Key, Timing
from dspark_trt.steptable.table import isotonic

NOISE = 0.15  # a fall by more than this share, as tokens or requests are added, is not noise of a quiet machine
UNSTEADY = 0.25  # a call whose quartiles lie further apart, as a share of its median
MAX_UNSTEADY = 0.05  # share of the calls; more of them: the machine was busy
LEAST_MS = 0.1  # differences below it price nothing
_SIZES = {"step": "extra tokens", "draft": "slots"}
_NUM_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Doubts:
    """Of one measurement."""

    falls: tuple[str, ...]
    unsteady: tuple[Key, ...]
    is_busy: bool
    suspects: frozenset[Key]  # calls to measure again

    def sentences(self, load: Load, num_calls: int) -> list[str]:
        """For a person; empty: no doubt."""
        said = []
        if self.falls:
            more = f"; and {len(self.falls) - _NUM_SHOWN} more" if len(self.falls) > _NUM_SHOWN else ""
            said.append(f"more work measured clearly cheaper: {'; '.join(self.falls[:_NUM_SHOWN])}{more}")
        if self.is_busy:
            shown = "; ".join(_name(key) for key in self.unsteady[:_NUM_SHOWN])
            differ = f", and repeats of {len(self.unsteady)} of {num_calls} calls differ by more than {UNSTEADY:.0%}"
            said.append(
                f"the machine was busy: other work took {load.others_cores:g} cores (load average "
                f"{load.load_average:g}){f'{differ} ({shown})' if shown else ''}"
            )
        return said


def doubts_of(measured: Mapping[Key, Timing], load: Load, num_threads: int) -> Doubts:
    """num_threads: of the engine, each of which wants a core."""
    falls: dict[str, None] = {}
    suspects: set[Key] = set()
    for axis in (1, 2, 3):
        curves: dict[tuple[object, ...], list[Key]] = {}
        for key in sorted(measured):
            curves.setdefault((*key[:axis], *key[axis + 1 :]), []).append(key)
        for curve in curves.values():
            times = [measured[key].ms for key in curve]
            for key, ms, repaired in zip(curve, times, isotonic(times), strict=True):
                if ms < repaired * (1 - NOISE) and repaired - ms > LEAST_MS:
                    falls[f"{_name(key)}: {ms:.1f} ms, {repaired:.1f} expected"] = None
                    suspects.update(curve)
    unsteady = tuple(
        key for key, each in measured.items() if each.spread > UNSTEADY and each.spread * each.ms > LEAST_MS
    )
    is_busy = load.is_busy(num_threads)
    if is_busy:
        suspects.update(measured)
    elif len(unsteady) > MAX_UNSTEADY * len(measured):
        is_busy = True
        suspects.update(unsteady)
    return Doubts(tuple(falls), unsteady, is_busy, frozenset(suspects))


def steadier(first: Mapping[Key, Timing], again: Mapping[Key, Timing]) -> dict[Key, Timing]:
    """Of each call, the lower median: other work only ever adds time."""
    return {
        key: min(timing, again[key], key=lambda each: each.ms) if key in again else timing
        for key, timing in first.items()
    }


def _name(key: Key) -> str:
    kind, depth, num_requests, size = key
    if kind == "ingest":
        return f"ingest of {size} tokens"
    return f"{kind} of {num_requests} requests with {size} {_SIZES[kind]} at {depth} positions"
