"""The step table: interpolation, extrapolation, noise, and the steps that the profiler times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dspark_trt.errors import ManifestError
from dspark_trt.steptable import profile as profile_module
from dspark_trt.steptable.profile import NUM_SWEEPS_OF_LONG_STEPS, request_grid, sweep, token_grid, verification_batch
from dspark_trt.steptable.table import StepTable, isotonic

TABLE = StepTable(
    num_requests=(1, 4),
    batch_tokens=(1, 2, 4, 8),
    step_ms=((10.0, 12.0, 11.0, 20.0), (None, None, 16.0, 24.0)),
    draft_ms=(3.0, 5.0),
    provenance={},
)


def test_measured_points_are_returned_and_points_between_are_interpolated() -> None:
    assert TABLE.curve(4, 4, 4).tolist() == [16.0]
    assert TABLE.curve(4, 6, 6).tolist() == [20.0]


def test_small_inversion_never_makes_more_tokens_cheaper() -> None:
    assert np.all(np.diff(TABLE.curve(1, 1, 8)) >= 0)


def test_isotonic_pools_what_falls_and_keeps_what_rises() -> None:
    assert isotonic([1.0, 5.0, 3.0, 4.0, 9.0]) == [1.0, 4.0, 4.0, 4.0, 9.0]
    assert isotonic([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]


def test_request_count_between_two_measured_ones_takes_the_higher() -> None:
    assert TABLE.curve(3, 8, 8).tolist() == [24.0]


def test_tokens_beyond_the_table_are_extrapolated_upwards() -> None:
    curve = TABLE.curve(1, 8, 16)
    assert np.all(np.diff(curve) > 0)


def test_curve_of_a_request_count_measured_less_far_still_rises() -> None:
    table = StepTable((1, 2), (1, 2, 4, 8), ((10.0, 12.0, 16.0, 24.0), (None, 13.0, 18.0, None)), (3.0, 4.0), {})
    assert table.curve(2, 6, 8).tolist() == [22.0, 24.0, 26.0]


def test_table_survives_saving(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "table.json")
    assert StepTable.load(tmp_path / "table.json") == TABLE


def test_missing_table_is_a_manifest_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no step table"):
        StepTable.load(tmp_path / "table.json")


def test_grids_end_at_the_limits() -> None:
    assert request_grid(6) == (1, 2, 4, 6)
    assert token_grid(7, 64)[-1] == 64
    assert set(range(1, 9)) <= set(token_grid(7, 64))


@pytest.mark.parametrize(("max_slots", "num_requests"), [(1, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("batch_tokens", [4, 9, 17, 40])
def test_timed_step_is_one_that_the_engine_accepts(max_slots: int, num_requests: int, batch_tokens: int) -> None:
    gamma = 3
    batch = verification_batch(num_requests, batch_tokens, gamma, depth=16, max_slots=max_slots)
    assert batch.query_lengths.sum() == batch_tokens == len(batch.token_ids)
    assert batch.query_lengths.min() >= 1
    assert batch.query_lengths[: batch.num_decode].max(initial=1) <= gamma + 1
    assert len(set(batch.rows.tolist())) == len(batch.rows) <= max_slots


class Queue:
    """A device that only does its work when it is waited for, on a clock of its own."""

    def __init__(self, milliseconds: list[float]) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self._milliseconds = iter(milliseconds)

    def call(self) -> None:
        self.calls.append("call")

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.now += next(self._milliseconds) / 1e3


def test_what_engines_only_enqueue_is_timed_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue([900.0, 900.0, 900.0, 4.0, 5.0, 6.0, 5.0, 5.0])
    monkeypatch.setattr(profile_module.time, "perf_counter", lambda: queue.now)
    measured = sweep({(1, 1): queue.call}, lambda fraction: None, synchronize=queue.synchronize, num_warm_ups=3)
    assert measured[1, 1] == pytest.approx(5.0)
    assert queue.calls == ["call", "synchronize"] * 8


def test_steps_known_to_be_long_are_timed_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue([1.0, *[200.0] * 5])
    monkeypatch.setattr(profile_module.time, "perf_counter", lambda: queue.now)
    assert sweep({(1, 1): queue.call}, lambda fraction: None, synchronize=queue.synchronize)[1, 1] == pytest.approx(200)
    assert queue.calls.count("call") == 1 + NUM_SWEEPS_OF_LONG_STEPS
