"""The measurement of what deciding costs works, whatever the machine is doing."""

from __future__ import annotations

import decision_cost
import pytest


def test_every_request_count_is_timed_in_both_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_cost, "NUM_STEPS", 8)
    monkeypatch.setattr(decision_cost, "NUM_WARM_UPS", 2)
    row = decision_cost.measure(decision_cost.realistic_table(), 64)
    assert row["limit_us"] == 60
    assert 0 < row["draft_policy_us"] < row["median_us"]
    assert 0 < row["prefix_scheduler_us"] < row["median_us"]
