"""The measurement of what a device pays once runs through on a CPU with a tiny pair: the script of the GPU check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from device_costs import main

TINY = ["--size", "tiny", "--layers", "3", "--requests", "8"]


def test_buckets_prompts_and_warm_up_are_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main([*TINY, "--device", "cpu", "--output", str(report)]) == 0
    found = json.loads(report.read_text())
    assert [row["num_requests"] for row in found["new_buckets"]] == [1, 2, 8]
    assert [row["target_calls"] for row in found["prompts"]] == [1, 1]  # block tables of any rows stand side by side
    assert found["warm_up"]["calls"] > 20
    assert all(milliseconds > 0 for milliseconds in found["steps_after_warm_up_ms"])


def test_without_a_gpu_the_exit_status_is_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*TINY, "--device", "cuda"]) == 3
    assert "sees no CUDA GPU" in capsys.readouterr().err
