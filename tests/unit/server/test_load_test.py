"""A load test survives what perf_analyzer does to its own export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_trt.server import load_test
from dspark_trt.server.perf_analyzer import PerfAnalyzer

REQUEST = {
    "timestamp": 0,
    "response_timestamps": [10_000_000, 30_000_000],
    "response_outputs": [
        {"num_output_tokens": 1},
        {"num_output_tokens": 2, "finish_reason": "length", "num_steps": 1, "total_draft_tokens": 3},
    ],
}
EXPORT = json.dumps({"experiments": [{"experiment": {"value": 1}, "requests": [REQUEST, REQUEST]}]})


def fake_tool(folder: Path, exports: list[str]) -> PerfAnalyzer:
    """A program that writes the next of `exports` where perf_analyzer would write its own."""
    for number, export in enumerate(exports):
        (folder / f"export-{number}").write_text(export)
    program = folder / "perf_analyzer"
    program.write_text(
        f"""#!/bin/sh
for last; do :; done
next=$(cat {folder}/count 2>/dev/null || echo 0)
cp {folder}/export-$next "$last"
echo $((next + 1)) > {folder}/count
"""
    )
    program.chmod(0o755)
    return PerfAnalyzer(executable=program, libraries=(folder,), origin="a test")


def test_export_cut_short_is_measured_again(tmp_path: Path) -> None:
    tool = fake_tool(tmp_path, [EXPORT[:200], EXPORT])
    result = load_test.measure("127.0.0.1:1", 1, "off", num_requests=1, rows=[{}], tool=tool)
    assert (result.num_tokens, result.accepted_len, result.mean_verify_len) == (3, 2.0, 3.0)


def test_export_that_is_always_cut_short_is_an_error(tmp_path: Path) -> None:
    tool = fake_tool(tmp_path, [EXPORT[:200]] * load_test.NUM_ATTEMPTS)
    with pytest.raises(load_test.LoadTestError, match="incomplete 3 times"):
        load_test.measure("127.0.0.1:1", 1, "off", num_requests=1, rows=[{}], tool=tool)
