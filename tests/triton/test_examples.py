"""The examples run as a reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dspark_trt.server.supervisor import TritonServer
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.demo


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(REPOSITORY / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_answers_every_question(demo_build: Path) -> None:
    printed = run("generate.py", str(demo_build), "What is the capital of France?", "What is 2 + 2?")
    assert printed.count("accepted_len") == 2
    assert "[What is 2 + 2?] accepted_len" in printed


@pytest.mark.triton
def test_stream_prints_an_answer(server: TritonServer) -> None:
    assert len(run("stream.py", server.grpc_address, "What is the capital of France?").split()) > 2
