"""A build without a drafter behind a real tritonserver: its drafts are accepted, and the text is plain decoding's."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.commands.generation import generate as generate_here
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.deployment import load_deployment
from dspark_trt.server.options import ServeOptions
from dspark_trt.server.supervisor import TritonServer
from tests.support.triton_clients import generate, metrics

pytestmark = pytest.mark.triton

PROMPT = "abcabcabcabc"


def test_copied_drafts_serve_the_text_of_plain_decoding(ngram_build: Path, tmp_path: Path) -> None:
    deployment = load_deployment(ngram_build)
    sampling = deployment.sampling_params(max_tokens=40, temperature=0.0)
    ids = deployment.codec.encode(PROMPT)
    (expected,) = generate_here(deployment, [ids], sampling, parse_scheduler("off"))
    options = ServeOptions(0, 0, 0, scheduler="fixed", log_file=tmp_path / "log")
    with TritonServer(ngram_build, options) as server:
        answer = generate(server.http_url, text_input=PROMPT, max_tokens=40, temperature=0.0)
        accepted = metrics(server.metrics_url)['dspark_drafts_total{model="dspark",state="accepted"}']
    assert answer["text_output"] == expected["text"]
    assert accepted > 0
