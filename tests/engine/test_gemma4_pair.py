"""A Gemma 4 pair through the loop and through the commands: greedy texts, distribution, build, generate, verify."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dspark_trt.cli import app
from dspark_trt.contract.scheduler import SchedulerConfig
from tests.support.conversations import open_pair, read_pair
from tests.support.device_cases import LIMITS, VOCABULARY, Pair, check_distribution, check_greedy, greedy_requests
from tests.support.gemma4 import write_gemma_drafter, write_gemma_target


def open_small(folder: Path, vocab_size: int, seed: int) -> tuple[Any, Pair]:
    target_folder = write_gemma_target(folder / "target", vocab_size=vocab_size, final_logit_softcapping=3.0)
    pair = Pair(*read_pair(target_folder, write_gemma_drafter(folder / "drafter", target_folder, seed=seed)))
    target, drafter = open_pair(pair.target, pair.drafter, folder / "graphs", limits=LIMITS)
    return SimpleNamespace(target=target, drafter=drafter, step=None), pair


def test_greedy_texts_are_those_of_transformers_at_every_verify_length(tmp_path: Path) -> None:
    engines, pair = open_small(tmp_path, VOCABULARY, seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    expected = {}
    for request in greedy_requests():
        ids = torch.tensor([request.prompt_ids])
        with torch.no_grad():
            texts = model.generate(
                ids, max_new_tokens=request.sampling.max_tokens, do_sample=False, eos_token_id=VOCABULARY
            )
        expected[request.request_id] = texts[0, ids.shape[1] :].tolist()
    modes = [SchedulerConfig("fixed", verify_len=length) for length in range(1, pair.gamma + 1)]
    for scheduler in (*modes, SchedulerConfig("early_stop"), SchedulerConfig("lagged_budget")):
        check_greedy(engines, pair, scheduler, expected)


@pytest.mark.parametrize("mode", ["fixed", "early_stop", "lagged_budget"])
def test_sampled_texts_have_the_targets_distribution(mode: str, tmp_path: Path) -> None:
    engines, pair = open_small(tmp_path, 5, seed=1)
    check_distribution(engines, pair, SchedulerConfig(mode), num_samples=500)  # type: ignore[arg-type]


def test_a_pair_is_built_by_one_command_generates_and_verifies(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"has_other_parts": True, "tokenizer": True, "vocab_size": 320}
    target = write_gemma_target(tmp_path / "target", "gemma4_unified", **keys)
    drafter = write_gemma_drafter(tmp_path / "drafter", target)
    output = str(tmp_path / "build")
    limits = "--max-requests 4 --max-seq-len 64 --max-batch-tokens 64 --num-threads 1"
    plain = "--draft-vocab all --drafter-precision fp32 --markov-top-n 0"  # choosing takes longer than the rest
    pair = ["--target", str(target), "--drafter", str(drafter), "--output", output]
    called("build", *pair, *limits.split(), *plain.split())
    called("generate", output, "the quick", "--max-tokens", "8", "--json")
    options = "--prompts 2 --samples 2 --max-tokens 8 --modes fixed,early_stop --json"
    report = json.loads(called("verify", output, *options.split()))
    assert report["has_passed"]
    assert all(mode["num_drafts_verified"] > 0 and not mode["differences"] for mode in report["modes"])


def called(*arguments: str) -> str:
    """What a command that ended well has printed."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout
