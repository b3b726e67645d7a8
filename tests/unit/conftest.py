"""A small pair, and a build of it by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.factories import write_drafter, write_target
from tests.unit.test_cli import run

LIMITS = ["--max-requests", "2", "--max-seq-len", "64", "--max-batch-tokens", "32"]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", vocab_size=320, head_dim=16, tokenizer=True)
    drafter = write_drafter(folder / "drafter", target)
    return ["--target", str(target), "--drafter", str(drafter)]


@pytest.fixture(scope="session")
def built(pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("built") / "out"
    result = run("build", *pair, *LIMITS, "--output", str(output), "--json")
    assert result.returncode == 0, result.stderr
    described = json.loads(result.stdout)
    assert described["stages"][0]["stage"] == "checkpoints"
    assert (described["backend"], described["precision"]) == ("onnxruntime", "fp32")
    return output
