"""The demonstration target, decoded speculatively, against Hugging Face transformers in float32.

A greedy text may part from the reference only where the two best logits are closer than float noise; the gap is
measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dspark_trt.commands.generation import generate
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import Deployment
from dspark_trt.runtime.request import SamplingParams

pytestmark = pytest.mark.demo

NUM_TOKENS = 40
EXCUSABLE_GAP = 1e-3  # logits
PROMPTS = (
    "Why do leaves change colour in autumn?",
    "Write a Python function that reverses a linked list.",
    "A baker sells 14 loaves a day at 3 dollars each. How much does she earn in a week?",
    "List the planets of the solar system, from the sun outwards.",
    "Translate 'good morning' into French, German and Italian.",
    "Give me a recipe for lentil soup.",
    "What is the difference between a virus and a bacterium?",
    "Once upon a time, in a village by the sea,",
)


@pytest.fixture(scope="module")
def model(demo_target_path: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(demo_target_path.parent, gguf_file=demo_target_path.name)
    with torch.device("meta"):
        shape_only = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(demo_target_path, return_tensors=True, model_to_load=shape_only)["tensors"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def prompts(demo: Deployment) -> list[list[int]]:
    return [demo.codec.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]


def reference(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=2, **options
        )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [reference(model, prompt) for prompt in prompts]


def assert_same_greedy(model: PreTrainedModel, prompt: list[int], found: list[int], wanted: list[int]) -> None:
    if found == wanted:
        return
    at = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + wanted[:at]])).logits[0, -1]
    gap = abs(float(logits[found[at]] - logits[wanted[at]]))
    assert gap < EXCUSABLE_GAP, f"token {at}: found {found[at]}, expected {wanted[at]}, logit gap {gap:.2e}"


SCHEDULERS = [
    SchedulerConfig(mode="off"),
    *(SchedulerConfig(mode="fixed", verify_len=length) for length in range(8)),
    SchedulerConfig(mode="early_stop"),
    SchedulerConfig(mode="lagged_budget"),
    SchedulerConfig(mode="threshold", threshold=0.3),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda s: f"{s.mode}-{s.verify_len}")
def test_greedy_batch_of_eight_equals_transformers(
    demo: Deployment,
    model: PreTrainedModel,
    prompts: list[list[int]],
    expected: list[list[int]],
    scheduler: SchedulerConfig,
) -> None:
    results = generate(demo, prompts, SamplingParams(max_tokens=NUM_TOKENS), scheduler)
    for prompt, result, wanted in zip(prompts, results, expected, strict=True):
        assert_same_greedy(model, prompt, result["token_ids"], wanted)


@pytest.mark.parametrize("mode", ["off", "early_stop", "fixed"])
def test_greedy_alone_equals_transformers(
    demo: Deployment, model: PreTrainedModel, prompts: list[list[int]], expected: list[list[int]], mode: Any
) -> None:
    (result,) = generate(demo, prompts[1:2], SamplingParams(max_tokens=NUM_TOKENS), SchedulerConfig(mode=mode))
    assert_same_greedy(model, prompts[1], result["token_ids"], expected[1])


def test_repetition_penalty_equals_transformers_also_for_verified_drafts(
    demo: Deployment, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    wanted = reference(model, prompts[5], repetition_penalty=1.3)
    params = SamplingParams(max_tokens=NUM_TOKENS, repetition_penalty=1.3)
    (result,) = generate(demo, prompts[5:6], params, SchedulerConfig(mode="fixed"))
    assert result["num_drafts_accepted"] > 0
    assert result["token_ids"] == wanted


def test_bad_words_and_min_tokens_equal_transformers(
    demo: Deployment, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    bad_words = demo.codec.encode_words(["the", "sun"])
    wanted = reference(model, prompts[3], bad_words_ids=[list(word) for word in bad_words], min_new_tokens=NUM_TOKENS)
    params = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, bad_words=bad_words)
    (result,) = generate(demo, prompts[3:4], params, SchedulerConfig(mode="fixed"))
    assert result["token_ids"] == wanted


def test_log_probs_equal_the_raw_log_softmax_of_transformers(
    demo: Deployment, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, num_log_probs=3, temperature=0.8, top_p=0.9, seed=5)
    (result,) = generate(demo, prompts[:1], params, SchedulerConfig(mode="fixed"))
    ids = result["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompts[0] + ids[:-1]])).logits[0, len(prompts[0]) - 1 :]
    wanted = torch.log_softmax(logits.double(), -1)[range(len(ids)), ids].numpy()
    np.testing.assert_allclose(result["log_probs"], wanted, atol=1e-4)
    assert len(result["top_log_probs"]) == len(ids)


def test_stop_string_cuts_the_text_of_the_plain_run(demo: Deployment, prompts: list[list[int]]) -> None:
    (plain,) = generate(demo, prompts[5:6], SamplingParams(max_tokens=NUM_TOKENS), SchedulerConfig(mode="off"))
    stop = plain["text"][40:46]
    params = SamplingParams(max_tokens=NUM_TOKENS, stop_strings=(stop,))
    (result,) = generate(demo, prompts[5:6], params, SchedulerConfig(mode="fixed"))
    assert result["text"] == plain["text"][: plain["text"].index(stop)]
    assert result["finish_reason"] == "stop"


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_is_exact(demo: Deployment, prompts: list[list[int]], max_tokens: int) -> None:
    (result,) = generate(demo, prompts[:1], SamplingParams(max_tokens=max_tokens), SchedulerConfig(mode="fixed"))
    assert (len(result["token_ids"]), result["finish_reason"]) == (max_tokens, "length")
