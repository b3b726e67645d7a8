"""The numbers of the live page from two readings of the metrics."""

from __future__ import annotations

import pytest

from dspark_trt.server.openai.live import Reading, describe, parse

BEFORE = """
# HELP dspark_tokens_total Tokens handed out
dspark_tokens_total{model="dspark"} 100
dspark_drafts_total{model="dspark",state="accepted"} 40
dspark_drafts_total{model="dspark",state="verified"} 90
dspark_requests_running{model="dspark"} 1
dspark_max_requests{model="dspark"} 32
dspark_verify_len_count{model="dspark"} 10
dspark_verify_len_sum{model="dspark"} 20
dspark_verify_len_bucket{model="dspark",le="0.5"} 3
dspark_steps_total{model="dspark"} 12
dspark_steps_without_drafts_total{model="dspark"} 1
dspark_time_to_first_token_seconds_count{model="dspark"} 2
dspark_time_to_first_token_seconds_sum{model="dspark"} 0.5
nv_inference_count{model="dspark",version="1"} 7
"""
AFTER = (
    BEFORE.replace("} 100", "} 160")
    .replace('"accepted"} 40', '"accepted"} 60')
    .replace('_count{model="dspark"} 10', '_count{model="dspark"} 30')
    .replace('_sum{model="dspark"} 20', '_sum{model="dspark"} 60')
    .replace('without_drafts_total{model="dspark"} 1', 'without_drafts_total{model="dspark"} 6')
    .replace('running{model="dspark"} 1', 'running{model="dspark"} 4')
    .replace('seconds_count{model="dspark"} 2', 'seconds_count{model="dspark"} 4')
    .replace('seconds_sum{model="dspark"} 0.5', 'seconds_sum{model="dspark"} 1.1')
)


def reading(seconds: float, text: str) -> Reading:
    return Reading(seconds, text, parse(text))


def test_rates_and_means_between_two_readings() -> None:
    now = describe(reading(5.0, BEFORE), reading(15.0, AFTER))
    assert now["window_s"] == 10.0
    assert now["running"] == 4
    assert now["rows"] == 32
    assert now["tokens_per_s"] == pytest.approx(6.0)
    assert now["accepted_len"] == pytest.approx(60 / 40)
    assert now["verify_len"] == pytest.approx(2.0)
    assert now["skipping"] == pytest.approx(0.25)
    assert now["ttft_s"] == pytest.approx(0.3)


def test_nothing_happened_is_not_zero() -> None:
    now = describe(reading(5.0, AFTER), reading(15.0, AFTER))
    assert now["tokens_per_s"] == 0.0
    assert [now[name] for name in ("accepted_len", "verify_len", "skipping", "ttft_s")] == [None] * 4


def test_a_server_that_was_started_again_counts_from_zero() -> None:
    assert describe(reading(5.0, AFTER), reading(15.0, BEFORE))["tokens_per_s"] == 0.0


def test_buckets_and_families_of_others_are_left_out() -> None:
    samples = parse(BEFORE)
    assert samples["dspark_drafts_total/accepted"] == 40
    assert not [name for name in samples if "bucket" in name or name.startswith("nv_")]
