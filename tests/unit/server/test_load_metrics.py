"""Errors of prices and steps without drafts, between two readings of a server's metrics."""

from __future__ import annotations

import pytest

from dspark_trt.server.load_metrics import price_errors, step_counts, steps_not_drafting


def page(up_to: dict[str, int], num_decoding: int, num_not_drafting: int) -> str:
    """As Triton writes it, with metrics that are none of ours."""
    lines = ["# HELP dspark_step_price_error_ratio x", 'nv_inference_count{model="ensemble"} 7']
    lines += [f'dspark_step_price_error_ratio_bucket{{model="dspark",le="{le}"}} {n}' for le, n in up_to.items()]
    lines += [f'dspark_verify_len_count{{model="dspark"}} {num_decoding}']
    lines += [f'dspark_steps_without_drafts_total{{model="dspark"}} {num_not_drafting}']
    return "\n".join(lines) + "\n"


def test_errors_between_two_readings_lie_evenly_in_their_buckets() -> None:
    before = step_counts(page({"0.1": 5, "0.2": 5, "+Inf": 6}, 10, 2))
    behind = step_counts(page({"0.1": 7, "0.2": 11, "+Inf": 13}, 18, 4))
    assert price_errors(before, behind) == pytest.approx((0.025, 0.075, 0.1125, 0.1375, 0.1625, 0.1875, 0.2))
    assert steps_not_drafting(before, behind) == 0.25


def test_server_without_priced_steps_has_no_errors() -> None:
    empty = step_counts("")
    assert price_errors(empty, empty) == ()
    assert steps_not_drafting(empty, empty) is None
