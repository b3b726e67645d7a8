"""`generate` on a tiny random build: what the batch may not change, and what is refused before an engine runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_trt.cli import app
from dspark_trt.commands.generation import generate
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import Deployment, load_deployment
from dspark_trt.errors import RequestError

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7], [40, 41, 42, 43]]
FIELDS = {
    "text",
    "token_ids",
    "finish_reason",
    "num_prompt_tokens",
    "num_prompt_tokens_reused",
    "num_steps",
    "num_drafts_proposed",
    "num_drafts_verified",
    "num_drafts_accepted",
    "accepted_len",
    "mean_verify_len",
    "accepted_lens",
    "verify_lens",
    "acceptance_per_position",
    "timings_ms",
}


@pytest.fixture(scope="module")
def deployment(output: Path) -> Deployment:
    return load_deployment(output)


def test_seeded_output_is_the_same_alone_and_in_a_batch_and_equal_prompts_differ(deployment: Deployment) -> None:
    sampling = deployment.sampling_params(max_tokens=24, temperature=2.0, seed=11, ignore_eos=True)
    scheduler = SchedulerConfig(mode="fixed", verify_len=3)
    together = [result["token_ids"] for result in generate(deployment, PROMPTS, sampling, scheduler)]
    alone = [generate(deployment, [prompt], sampling, scheduler)[0]["token_ids"] for prompt in PROMPTS]
    assert [together[index] for index in (0, 1, 3)] == [alone[index] for index in (0, 1, 3)]
    assert together[2] != together[0]


def test_result_has_the_documented_fields(deployment: Deployment) -> None:
    sampling = deployment.sampling_params(max_tokens=8)
    (result,) = generate(deployment, [PROMPTS[0]], sampling, SchedulerConfig())
    assert set(result) == FIELDS
    assert len(result["accepted_lens"]) == len(result["verify_lens"]) == result["num_steps"]
    assert 1 + sum(result["accepted_lens"]) == len(result["token_ids"])


def test_terminal_without_unicode_does_not_end_the_generation(output: Path) -> None:
    options = ["--prompt", "a", "--max-tokens", "40", "--temperature", "3", "--seed", "1", "--ignore-eos"]
    result = subprocess.run(
        [sys.executable, "-m", "dspark_trt", "generate", str(output), *options],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert b"?" in result.stdout


@pytest.mark.parametrize("options", [[], ["--chat"]])
def test_empty_prompt_is_refused_whatever_the_tokenizer_or_the_template_adds(output: Path, options: list[str]) -> None:
    with pytest.raises(RequestError, match="empty"):
        app(["generate", str(output), "--prompt", "", *options], standalone_mode=False)
