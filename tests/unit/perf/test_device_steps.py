"""The benchmark of device steps runs through on a CPU with a tiny pair, and says what it lacks where it cannot run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from device_steps import main

TINY = ["--size", "tiny", "--layers", "3", "--requests", "2"]


def test_every_way_of_stepping_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main([*TINY, "--device", "cpu", "--output", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["steps_without_cuda_graphs"][0].keys() == found["steps"][0].keys()
    (row,) = found["steps"]
    assert row.pop("num_requests") == 1
    assert set(row) == {
        *("plain_step_ms", "full_verification_ms", "draft_block_ms"),
        *("draft_then_verify_ms", "fused_step_ms"),
    }
    assert all(ms > 0 for ms in row.values())
    assert "fused_step_ms" in capsys.readouterr().out


def test_without_a_gpu_the_exit_status_is_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*TINY, "--device", "cuda"]) == 3
    assert "sees no CUDA GPU" in capsys.readouterr().err
