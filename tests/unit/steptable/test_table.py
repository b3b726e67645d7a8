"""The step table: interpolation, extrapolation, noise, and the steps that the profiler times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import ManifestError
from dspark_trt.steptable.grid import extra_grid, request_grid, verification_batch
from dspark_trt.steptable.table import StepTable, isotonic

TABLE = StepTable(
    num_requests=(1, 4),
    extra_tokens=(0, 1, 3, 7),
    step_ms=(((10.0, 12.0, 11.0, 20.0), (16.0, None, 22.0, 30.0)),),
    num_slots=(1, 3),
    draft_ms=(((3.0, 5.0), (6.0, 12.0)),),
    ingest_tokens=(1, 9),
    ingest_ms=(1.0, 5.0),
    host_ms=(1.0, 2.5),
    drafting_host_ms=(0.5, 0.5),
)


def price(table: StepTable, num_requests: int, extra: int, context: float = 0.0) -> float:
    return float(table.step_curve(num_requests, context, extra, extra)[0])


def test_measured_points_are_returned_and_points_between_are_interpolated() -> None:
    assert price(TABLE, 4, 0) == 16.0
    assert price(TABLE, 4, 5) == 26.0
    assert price(TABLE, 4, 1) == 18.0


def test_small_inversion_never_makes_more_tokens_cheaper() -> None:
    assert np.all(np.diff(TABLE.step_curve(1, 0, 0, 7)) >= 0)


def test_isotonic_pools_what_falls_and_keeps_what_rises() -> None:
    assert isotonic([1.0, 5.0, 3.0, 4.0, 9.0]) == [1.0, 4.0, 4.0, 4.0, 9.0]
    assert isotonic([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]


def test_between_two_measured_request_counts_every_token_still_has_its_price() -> None:
    curve = TABLE.step_curve(2, 0, 0, 7)
    assert curve[0] == pytest.approx(12.0)  # a third of the way from 10 to 16
    assert np.all(np.diff(curve) > 0)


def test_tokens_beyond_the_table_are_extrapolated_upwards() -> None:
    assert np.all(np.diff(TABLE.step_curve(1, 0, 7, 16)) > 0)


def test_curve_of_a_request_count_measured_less_far_still_rises() -> None:
    step_ms = (((10.0, 12.0, 16.0, 24.0), (13.0, 18.0, None, None)),)
    table = StepTable(num_requests=(1, 2), extra_tokens=(0, 1, 3, 7), step_ms=step_ms, draft_ms=(((3.0,), (4.0,)),))
    assert table.step_curve(2, 0, 1, 7).tolist() == [18.0, 20.0, 22.0, 24.0, 26.0, 28.0, 30.0]


def test_deeper_contexts_cost_more_between_and_beyond_the_measured_depths() -> None:
    planes = (((10.0, 11.0),), ((20.0, 22.0),))
    table = StepTable(
        num_requests=(1,), extra_tokens=(0, 1), step_ms=planes, draft_ms=(((1.0,),), ((3.0,),)), context_tokens=(0, 640)
    )
    assert [price(table, 1, 0, context) for context in (0, 320, 640, 1280)] == [10.0, 15.0, 20.0, 30.0]
    assert price(table, 1, 1, 320) == 16.5
    assert table.draft_cost(1, 1, 320) == 2.0


def test_a_padded_table_is_a_stair_in_requests_and_in_tokens() -> None:
    """Buckets of 2 and 4 requests and of 4 and 8 tokens: 3 requests pay for 4, 5 tokens for 8."""
    table = StepTable(
        num_requests=(2, 4),
        extra_tokens=(0, 2, 4, 6),
        step_ms=(((10.0, 11.0, None, 14.0), (12.0, None, 16.0, None)),),
        draft_ms=(((1.0,), (2.0,)),),
        is_padded=True,
    )
    assert table.step_curve(2, 0, 0, 6).tolist() == [10, 11, 11, 14, 14, 14, 14]
    assert table.step_curve(3, 0, 0, 5).tolist() == [12, 12, 16, 16, 16, 16]


def test_drafts_and_ingested_tokens_have_their_own_prices() -> None:
    assert TABLE.draft_cost(4, 3, 0) == 12.0
    assert TABLE.draft_cost(1, 2, 0) == 4.0
    assert TABLE.draft_cost(0, 2, 0) == 0.0
    assert TABLE.ingest_cost(5) == 3.0
    assert TABLE.ingest_cost(18) == 10.0
    assert TABLE.host_cost(4, is_drafting=True) == 3.0


def test_table_survives_saving(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "table.json")
    loaded = StepTable.load(tmp_path / "table.json")
    assert (loaded.step_ms, loaded.draft_ms, loaded.ingest_ms) == (TABLE.step_ms, TABLE.draft_ms, TABLE.ingest_ms)


def test_missing_table_is_a_manifest_error(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no step table"):
        StepTable.load(tmp_path / "table.json")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("step_ms", [[["fast", 12, 11, 20], [16, None, 22, 30]]], "valid number"),
        ("step_ms", [[[float("nan"), 12, 11, 20], [16, None, 22, 30]]], "step_ms"),
        ("step_ms", [[[-1, 12, 11, 20], [16, None, 22, 30]]], "step_ms"),
        ("step_ms", [[[None, 12, 11, 20], [16, None, 22, 30]]], "plain step"),
        ("step_ms", [], "step_ms"),
        ("draft_ms", [[[3.0], [6.0]]], "draft_ms"),
        ("num_requests", [4, 1], "ascending"),
        ("schema_version", 1, "schema 2"),
        ("surprise", 1, "known fields"),
    ],
)
def test_what_no_measurement_gives_is_refused(tmp_path: Path, field: str, value: object, message: str) -> None:
    path = tmp_path / "table.json"
    TABLE.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ManifestError, match=message):
        StepTable.load(path)


def test_grids_end_at_the_limits() -> None:
    limits = EngineLimits(max_requests=6, max_seq_len=400, max_batch_tokens=64)
    assert request_grid(6) == (1, 2, 4, 6)
    assert extra_grid(1, 7, limits)[-1] == 63
    assert extra_grid(6, 7, limits)[-1] == 42


@pytest.mark.parametrize(("max_requests", "num_requests"), [(1, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("batch_tokens", [4, 9, 17, 40])
def test_timed_step_is_one_that_the_engine_accepts(max_requests: int, num_requests: int, batch_tokens: int) -> None:
    gamma = 3
    batch = verification_batch(num_requests, batch_tokens, gamma, depth=16, max_requests=max_requests)
    assert batch.query_lengths.sum() == batch_tokens == len(batch.token_ids)
    assert batch.query_lengths.min() >= 1
    assert batch.query_lengths[: batch.num_decode].max(initial=1) <= gamma + 1
    assert len(set(batch.rows.tolist())) == len(batch.rows) <= max_requests
