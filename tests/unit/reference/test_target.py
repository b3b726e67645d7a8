"""The PyTorch target engine against transformers: logits over prefill, decode and rollback, and the taps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.protocol import EngineLimits, TargetBatch, TargetOutput
from dspark_trt.errors import CapacityError
from dspark_trt.reference.engines import ReferenceTargetEngine
from dspark_trt.reference.weights import ReferenceWeights
from tests.support.factories import write_target

LIMITS = EngineLimits(max_requests=4, max_seq_len=64, max_batch_tokens=96)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-bfloat16": {"tied": True, "dtype": "bfloat16", "shards": 2},
    "llama-biases-float16": {"biases": True, "dtype": "float16"},
    "llama-linear": {"rope": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama-llama3": {"rope": LLAMA3, "head_dim": 16},
    "llama-yarn": {"rope": YARN, "head_dim": 16},
    "qwen3": {"family": "qwen3", "head_dim": 12},
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "qwen3-biases": {"family": "qwen3", "biases": True},
    "qwen3-yarn": {"family": "qwen3", "rope": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    "qwen3-yarn-mscale": {"family": "qwen3", "rope": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}},
}


def open_engine(folder: Path, taps: tuple[int, ...] = ()) -> ReferenceTargetEngine:
    checkpoint = read_target(str(folder))
    weights = ReferenceWeights(checkpoint.weights, "cpu")
    return ReferenceTargetEngine(checkpoint.spec, weights, taps=taps, norm_last_tap=False, limits=LIMITS)


def forward(engine: ReferenceTargetEngine, *segments: tuple[int, int, list[int]]) -> TargetOutput:
    """Run (row, past, token ids) segments and ask for the logits of every token."""
    rows, past, tokens = zip(*segments, strict=True)
    lengths = [len(ids) for ids in tokens]
    return engine.forward(
        TargetBatch(
            token_ids=np.concatenate(tokens),
            rows=np.array(rows),
            past_lengths=np.array(past),
            query_lengths=np.array(lengths),
            num_decode=0,
            logit_rows=np.arange(sum(lengths)),
        )
    )


class Transformers:
    """The same checkpoint in transformers, float32, recomputed from the whole text at every call."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()

    def logits(self, token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return self.model(torch.tensor([token_ids])).logits[0].numpy()

    def raw_layer_outputs(self, token_ids: list[int]) -> dict[int, np.ndarray]:
        """By hooks: -1 is the embedding output, i what decoder layer i hands on, before any final norm."""
        found: dict[int, np.ndarray] = {}

        def keep(layer: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                found[layer] = (output[0] if isinstance(output, tuple) else output).detach().reshape(len(token_ids), -1)

            return hook

        modules = [self.model.model.embed_tokens, *self.model.model.layers]
        handles = [module.register_forward_hook(keep(layer)) for layer, module in enumerate(modules, start=-1)]
        self.logits(token_ids)
        for handle in handles:
            handle.remove()
        return {layer: tensor.numpy() for layer, tensor in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_over_prefill_decode_and_rollback(case: str, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", **CASES[case])
    engine, expected = open_engine(folder), Transformers(folder)
    random = np.random.default_rng(3)

    def tokens(count: int) -> list[int]:
        return random.integers(0, 97, count).tolist()

    def check(found: np.ndarray, text: list[int]) -> None:
        np.testing.assert_allclose(found, expected.logits(text)[-len(found) :], atol=1e-4)

    first, second, third = tokens(20), tokens(7), tokens(33)
    found = forward(engine, (2, 0, first), (0, 0, second)).logits
    check(found[:20], first)
    check(found[20:], second)
    # one decodes with drafts that will be rejected, one decodes alone, one prefills two chunks
    drafts = tokens(5)
    found = forward(engine, (2, 20, drafts), (0, 7, [9]), (1, 0, third[:18])).logits
    check(found[:5], first + drafts)
    check(found[5:6], [*second, 9])
    check(found[6:], third[:18])
    # only two of the five were committed; the rest is overwritten
    again = tokens(4)
    found = forward(engine, (1, 18, third[18:]), (2, 22, again)).logits
    check(found[:15], third)
    check(found[15:], first + drafts[:2] + again)
    engine.move_row(2, 3, 26)
    forward(engine, (2, 0, tokens(30)))  # the old row is somebody else's now
    more = tokens(3)
    check(forward(engine, (3, 26, more)).logits, first + drafts[:2] + again + more)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_taps_equal_forward_hooks_on_every_layer_and_the_embedding(family: str, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", family=family)  # type: ignore[arg-type]
    taps = (-1, 0, 2, 3)  # layer 3 is the last one: its raw output, not the normalised one
    engine = open_engine(folder, taps)
    text = np.random.default_rng(1).integers(0, 97, 24).tolist()
    found = np.concatenate([forward(engine, (1, 0, text[:10])).taps, forward(engine, (1, 10, text[10:])).taps])
    outputs = Transformers(folder).raw_layer_outputs(text)
    np.testing.assert_allclose(found, np.concatenate([outputs[layer] for layer in taps], axis=1), atol=1e-4)


def test_logits_come_in_the_order_of_the_rows_asked_for(tmp_path: Path) -> None:
    engine = open_engine(write_target(tmp_path / "target"))
    arguments = {
        "token_ids": np.array([5, 6, 7, 8]),
        "rows": np.array([0, 1]),
        "past_lengths": np.array([0, 0]),
        "query_lengths": np.array([3, 1]),
        "num_decode": 0,
    }
    everything = engine.forward(TargetBatch(logit_rows=np.arange(4), **arguments))
    some = engine.forward(TargetBatch(logit_rows=np.array([2, 3]), **arguments))
    np.testing.assert_allclose(some.logits, everything.logits[2:], atol=1e-5)
    assert some.taps.shape == (4, 0)
    none = engine.forward(TargetBatch(logit_rows=np.array([], np.int64), **arguments))
    assert none.logits.shape == (0, 97)


def test_more_than_the_limits_is_refused(tmp_path: Path) -> None:
    engine = open_engine(write_target(tmp_path / "target"))
    with pytest.raises(CapacityError, match="max_seq_len"):
        forward(engine, (0, 60, [1] * 5))
    with pytest.raises(CapacityError, match="max_requests"):
        forward(engine, (4, 0, [1]))
    with pytest.raises(CapacityError, match="max_batch_tokens"):
        forward(engine, (0, 0, [1] * 50), (1, 0, [1] * 50))
