"""A minute of what `perf/soak.py` does for ten: users that leave, bad requests, a killed process, full load."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import soak

pytestmark = pytest.mark.triton

SECONDS = 60.0


def test_loaded_server_answers_exactly_and_grows_by_nothing(tiny_build: Path) -> None:
    """No token is lost, wrong or out of order, before and after the process that decodes is killed."""
    result = soak(tiny_build, seconds=SECONDS, num_cases=20)
    assert result.failures == []
    assert result.num("answered") > 2 * result.concurrency
    assert result.num("cancelled")
    assert result.num("refused")
    assert len({way for way, outcome in result.counts if outcome == "answered"}) == 3
