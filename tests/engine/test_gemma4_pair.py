"""A Gemma 4 pair through the loop and through the commands: greedy texts, distribution, build, generate, verify."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dspark_trt.cli import app
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.reference.on_device import open_device_reference_engines
from tests.support.conversations import open_pair, read_pair
from tests.support.device_cases import (
    LIMITS,
    VOCABULARY,
    Pair,
    check_distribution,
    check_greedy,
    decode,
    greedy_requests,
    oracle_tokens,
    tokens_of,
)
from tests.support.gemma4 import write_gemma_drafter, write_gemma_target
from tests.support.onnxruntime_device_session import open_device_pair


def open_small(folder: Path, vocab_size: int, seed: int) -> tuple[Any, Pair]:
    target_folder = write_gemma_target(folder / "target", vocab_size=vocab_size, final_logit_softcapping=3.0)
    pair = Pair(*read_pair(target_folder, write_gemma_drafter(folder / "drafter", target_folder, seed=seed)))
    target, drafter = open_pair(pair.target, pair.drafter, folder / "graphs", limits=LIMITS)
    return SimpleNamespace(target=target, drafter=drafter, step=None, acceptance=None, pages=None), pair


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


def test_greedy_texts_stay_with_a_drafter_of_eight_bits_and_fewer_ids(tmp_path: Path) -> None:
    engines, pair = open_small(tmp_path, VOCABULARY, seed=1)
    expected = tokens_of(decode(engines.target, engines.drafter, None, SchedulerConfig("off")), greedy_requests())
    form = DrafterForm("int8", np.array([0, 1, 3, 5, 6, 8]), 3)
    (tmp_path / "other").mkdir()
    target, drafter = open_pair(pair.target, pair.drafter, tmp_path / "other", limits=LIMITS, form=form)
    check_greedy(
        SimpleNamespace(target=target, drafter=drafter, step=None, acceptance=None, pages=None),
        pair,
        SchedulerConfig("fixed"),
        expected,
    )


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
    (tmp_path / "temperatures.json").write_text(json.dumps({"temperatures": [1.0] * 5}))  # measuring takes long too
    calibration = ["--calibration", str(tmp_path / "temperatures.json")]
    called("build", *pair, *limits.split(), *plain.split(), *calibration)
    answer = json.loads(called("generate", output, "--prompt", "the quick", "--max-tokens", "8", "--json"))
    assert 0 < len(answer["token_ids"]) <= 8
    options = "--prompts 2 --samples 2 --max-tokens 8 --modes fixed,early_stop --json"
    report = json.loads(called("verify", output, *options.split()))
    assert report["has_passed"]
    assert all(mode["num_drafts_verified"] > 0 and not mode["differences"] for mode in report["modes"])


def called(*arguments: str) -> str:
    """What a command that ended well has printed."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("computed_by", ["ONNX Runtime", "PyTorch"])
@pytest.mark.parametrize("mode", ["fixed", "lagged_budget"])
def test_the_runtime_of_a_device_gives_the_same_texts(computed_by: str, mode: str, tmp_path: Path) -> None:
    """Its KV memory has a pool for each shape of layers; heads wider than any kernel are products of matrices there."""
    target_folder = write_gemma_target(tmp_path / "target", vocab_size=VOCABULARY, global_head_dim=264)
    pair = Pair(*read_pair(target_folder, write_gemma_drafter(tmp_path / "drafter", target_folder)))
    if computed_by == "PyTorch":
        engines = open_device_reference_engines(
            pair.target, pair.drafter, limits=LIMITS, precision="fp32", device="cpu"
        )
    else:
        engines = open_device_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=LIMITS).engines
    check_greedy(engines, pair, SchedulerConfig(mode), oracle_tokens(pair, greedy_requests()))  # type: ignore[arg-type]
