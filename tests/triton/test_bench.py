"""`bench --through-triton`: real servers, started and ended by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark_trt.cli import app

pytestmark = pytest.mark.triton


def test_modes_are_measured_through_servers_of_their_own(tiny_build: Path, tmp_path: Path) -> None:
    prompts, markdown = tmp_path / "prompts.jsonl", tmp_path / "report.md"
    prompts.write_text('{"prompt": "a", "kind": "chat"}\n{"prompt": "b", "kind": "code"}\n')
    options = [
        "--modes",
        "off,fixed:2",
        "--concurrency",
        "2",
        "--kinds",
        "mixed",
        "--repeats",
        "1",
        "--max-tokens",
        "8",
    ]
    options += ["--prompts", str(prompts), "--output", str(markdown), "--json"]
    result = CliRunner().invoke(app, ["bench", str(tiny_build), "--through-triton", *options])
    assert result.exit_code == 0, result.output
    off, fixed = json.loads(result.stdout)["summaries"]
    assert (off["mode"], off["mean_verify_len"], off["accepted_len"]) == ("off", 0, 1)
    assert fixed["mode"] == "fixed:2"
    assert 0 < fixed["mean_verify_len"] <= 2
    assert (off["steps_not_drafting"], fixed["steps_not_drafting"] < 1) == (1, True)
    assert fixed["price_error"][0] > 0, "of steps that were served"
    assert fixed["ratio_to_off"]["median"] > 0
    assert min(off["tokens_per_s"]["median"], off["user_tokens_per_s"], off["ttft_ms"]) > 0
    assert "Through Triton: a server for each mode in each repeat" in markdown.read_text()
