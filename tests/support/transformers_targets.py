"""Tiny random targets of every family, made and saved by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.support.conversations import open_pair, read_pair
from tests.support.factories import write_drafter
from tests.support.toy_engines import make_loop, run

VOCAB_SIZE = 97
# of a target's configuration that `write_drafter` starts from
NO_KEYS_OF_A_DRAFTER = dict.fromkeys(("num_experts", "num_local_experts", "sliding_window", "use_sliding_window"))
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def write_by_transformers(folder: Path, family: str, *, seed: int = 0, in_stacks: bool = False, **config: Any) -> Path:
    """Save a random model of `model_type` family, with weights that make logits of a standard deviation of about 3.

    `in_stacks`: experts as transformers 5 holds them, not as published checkpoints do.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(_SIZES | config)), dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.copy_(1 + 0.1 * torch.randn_like(weight))
                elif name.endswith("bias"):
                    weight.copy_(0.3 * torch.randn_like(weight))
                else:
                    gain = 3.0 if "embed_tokens" in name or "lm_head" in name else 1.5
                    weight.copy_(gain * torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder, save_original_format=not in_stacks)
    return folder


def change_config(folder: Path, **values: Any) -> Path:
    """Lay keys over config.json; None is written as null."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def greedy_by_transformers(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The most probable continuation of each prompt, computed from the whole text every time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    texts = [list(prompt) for prompt in prompts]
    for text in texts:
        for _ in range(num_tokens):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def greedy_with_drafts(
    target: Path, folder: Path, limits: EngineLimits, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """The same through the decoding loop on ONNX Runtime, with all drafts of a random drafter verified."""
    drafter = write_drafter(folder / "drafter", target, config_extra=NO_KEYS_OF_A_DRAFTER)
    engines = open_pair(*read_pair(target, drafter), folder / "graphs", limits=limits)
    loop = make_loop(*engines, SchedulerConfig("fixed"))  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [
        GenerationRequest(request_id=str(number), prompt_ids=tuple(prompt), sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]
    outputs = run(loop, requests)
    return [outputs[request.request_id].token_ids for request in requests]
