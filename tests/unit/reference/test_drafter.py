"""The PyTorch draft engine against a second implementation without any cache, and its heads against the NumPy ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.markov_head.reference import MarkovHeadOutput, markov_head
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.spec import PLAIN_ATTENTION, BlockAttention, DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.reference.engines import ReferenceDraftEngine, open_reference_engines
from tests.support.factories import write_drafter, write_target

LIMITS = EngineLimits(max_requests=4, max_seq_len=64, max_batch_tokens=96)
HIDDEN, TAPS = 32, (-1, 1, 3)
CASES: dict[str, dict[str, Any]] = {
    f"{head}-{'markov' if with_markov else 'plain'}-{'bias' if bias else 'no-bias'}": {
        "head_type": head,
        "confidence_with_markov": with_markov,
        "confidence_bias": bias,
    }
    for head, with_markov, bias in itertools.product(("vanilla", "gated", "rnn"), (True, False), (True, False))
} | {
    "no-confidence": {"confidence": False},
    "rnn-no-confidence": {"confidence": False, "head_type": "rnn"},
    "dflash": {"markov_rank": 0, "confidence": False},
    "rank-0-with-confidence": {"markov_rank": 0},
    "own-embedding-and-head": {"embed_head": "different"},
    "equal-embedding-and-head": {"embed_head": "equal"},
    "bfloat16": {"dtype": "bfloat16", "shards": 2},
    "other-heads": {"heads": 6, "kv_heads": 3, "head_dim": 10, "gamma": 7, "layers": 2},
    "yarn": {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}},
}
CAUSAL, NEAR, NEAR_ANCHOR = BlockAttention(True), BlockAttention(window=8), BlockAttention(True, 6, "anchor")
BLOCK_FORMS: dict[str, dict[str, Any]] = {
    "mask-first": {"is_mask_first": True},
    "causal": {"block_attention": (CAUSAL,) * 3},
    "window": {"block_attention": (NEAR,) * 3},
    "window-from-anchor": {"block_attention": (NEAR_ANCHOR,) * 3},
    "mixed-mask-first": {"is_mask_first": True, "block_attention": (PLAIN_ATTENTION, NEAR, NEAR_ANCHOR)},
}


class WithoutCache:
    """The drafter recomputed from the taps of the whole context, one request and one head at a time.

    Source: paper section 3.1, eq. 2-7.
    """

    def __init__(self, drafter: DrafterCheckpoint, target: TargetCheckpoint) -> None:
        self.spec = drafter.spec
        self.weights = {name: drafter.weights.array(name).astype(np.float64) for name in drafter.weights.names()}
        shared = {name: target.weights.array(name).astype(np.float64) for name in target.weights.names()}
        head = "embed_tokens.weight" if target.spec.is_head_tied else "lm_head.weight"
        self.embedding = self.weights.get("embed_tokens.weight", shared["embed_tokens.weight"])
        self.head = self.weights.get("lm_head.weight", shared[head])
        self.rope = self._rope()

    def draft(self, context: np.ndarray, anchor: int, temperature: float, uniforms: np.ndarray) -> MarkovHeadOutput:
        """context: [P, M*D] raw taps of positions 0 .. P-1."""
        hidden = self._backbone(context, anchor)
        spec = self.spec
        form = MarkovHeadForm(
            spec.gamma,
            spec.decoder.vocab_size,
            spec.markov_rank,
            spec.markov_head_type,
            spec.has_confidence_head,
            spec.has_confidence_bias,
            spec.is_confidence_with_markov,
        )
        return markov_head(
            form,
            self.weights,
            base_logits=(hidden @ self.head.T)[None],
            hidden=hidden[None],
            anchor_ids=np.array([anchor]),
            temperatures=np.array([temperature]),
            uniforms=uniforms[None],
        )

    def _backbone(self, context: np.ndarray, anchor: int) -> np.ndarray:
        decoder, weights = self.spec.decoder, self.weights
        past, length = len(context), self.spec.gamma + self.spec.is_mask_first
        feature = self._norm(context.astype(np.float64) @ weights["fc.weight"].T, "hidden_norm.weight")
        x = self.embedding[[anchor] + [self.spec.mask_token_id] * (length - 1)]
        for layer in range(decoder.num_layers):
            prefix = f"layers.{layer}."
            block = self._norm(x, prefix + "input_layernorm.weight")
            queries = self._heads(block, prefix + "self_attn.q", past)
            keys = np.concatenate(
                [self._heads(feature, prefix + "self_attn.k", 0), self._heads(block, prefix + "self_attn.k", past)]
            )
            values = np.concatenate([feature, block]) @ weights[prefix + "self_attn.v_proj.weight"].T
            values = values.reshape(past + length, decoder.num_kv_heads, decoder.head_dim)
            attended = np.empty_like(queries)
            for head in range(decoder.num_heads):
                shared = head // (decoder.num_heads // decoder.num_kv_heads)
                mix = np.exp(queries[:, head] @ keys[:, shared].T / np.sqrt(decoder.head_dim))
                mix *= self._is_seen(self.spec.attention_of(layer), past, length)
                attended[:, head] = mix @ values[:, shared] / mix.sum(axis=1, keepdims=True)
            x = x + attended.reshape(length, -1) @ weights[prefix + "self_attn.o_proj.weight"].T
            normed = self._norm(x, prefix + "post_attention_layernorm.weight")
            gate = normed @ weights[prefix + "mlp.gate_proj.weight"].T
            up = normed @ weights[prefix + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "mlp.down_proj.weight"].T
        return self._norm(x[self.spec.is_mask_first :], "norm.weight")

    @staticmethod
    def _is_seen(attention: BlockAttention, past: int, length: int) -> np.ndarray:
        """1 where a query of the block sees a key, one by one."""
        seen = np.ones((length, past + length))
        for query, key in np.ndindex(*seen.shape):
            distance = past + query - key  # negative: the key stands behind the query
            if attention.is_causal and distance < 0:
                seen[query, key] = 0
            if attention.window is not None and attention.window_from == "slot" and distance >= attention.window:
                seen[query, key] = 0
            if attention.window is not None and attention.window_from == "anchor" and past - key > attention.window:
                seen[query, key] = 0
        return seen

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.spec.decoder.rms_norm_eps) * self.weights[name]

    def _heads(self, x: np.ndarray, name: str, first_position: int) -> np.ndarray:
        """Projected, normalised and rotated heads: channel pairs (c, c + H/2) as complex numbers."""
        projected = x @ self.weights[f"{name}_proj.weight"].T
        head_dim = self.spec.decoder.head_dim
        heads = projected.reshape(len(x), projected.shape[1] // head_dim, head_dim)
        heads = self._norm(heads, f"{name}_norm.weight")
        half = head_dim // 2
        turned = (heads[..., :half] + 1j * heads[..., half:]) * self.rope[
            first_position : first_position + len(x), None
        ]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def _rope(self) -> np.ndarray:
        """exp(i angle) of every position and channel pair, from transformers' own frequencies."""
        decoder, rope = self.spec.decoder, self.spec.decoder.rope
        frequencies = rope.theta ** (-np.arange(0, decoder.head_dim, 2) / decoder.head_dim)
        scale = 1.0
        if rope.rope_type != "default":
            parameters = {
                "rope_type": rope.rope_type,
                "rope_theta": rope.theta,
                "factor": rope.factor,
                "original_max_position_embeddings": rope.original_max_position_embeddings,
            }
            config = Qwen3Config(head_dim=decoder.head_dim, rope_parameters=parameters)
            tensor, scale = ROPE_INIT_FUNCTIONS[rope.rope_type](config)
            frequencies = tensor.numpy().astype(np.float64)
        return scale * np.exp(1j * np.arange(LIMITS.max_seq_len + 16)[:, None] * frequencies)


def open_pair(
    folder: Path, tied: bool = False, form: dict[str, Any] | None = None, **drafter: Any
) -> tuple[ReferenceDraftEngine, WithoutCache]:
    target_folder = write_target(folder / "target", hidden=HIDDEN, tied=tied)
    drafter_folder = write_drafter(folder / "drafter", target_folder, taps=TAPS, **drafter)
    target = read_target(str(target_folder))
    checkpoint = read_drafter(str(drafter_folder), target)
    checkpoint = replace(checkpoint, spec=replace(checkpoint.spec, **(form or {})))
    _, engine = open_reference_engines(target, checkpoint, limits=LIMITS)
    return engine, WithoutCache(checkpoint, target)


def ingest(engine: ReferenceDraftEngine, *segments: tuple[int, int, np.ndarray]) -> None:
    """Run (row, past, taps) segments."""
    rows, past, taps = zip(*segments, strict=True)
    lengths = np.array([len(part) for part in taps])
    engine.ingest(IngestBatch(np.concatenate(taps), np.array(rows), np.array(past), lengths))


def draft(
    engine: ReferenceDraftEngine,
    contexts: dict[int, np.ndarray],
    temperatures: list[float],
    random: np.random.Generator,
) -> tuple[DraftBatch, DraftOutput]:
    batch = DraftBatch(
        rows=np.array(list(contexts)),
        anchor_ids=random.integers(0, 97, len(contexts)),
        past_lengths=np.array([len(context) for context in contexts.values()]),
        temperatures=np.array(temperatures, np.float32),
        uniforms=random.random((len(contexts), engine.gamma), dtype=np.float32),
    )
    return batch, engine.draft(batch)


def check(expected: WithoutCache, contexts: dict[int, np.ndarray], batch: DraftBatch, found: DraftOutput) -> None:
    for index, context in enumerate(contexts.values()):
        want = expected.draft(
            context, int(batch.anchor_ids[index]), float(batch.temperatures[index]), batch.uniforms[index]
        )
        np.testing.assert_array_equal(found.draft_ids[index], want.draft_ids[0])
        np.testing.assert_allclose(found.draft_logits[index], want.draft_logits[0], atol=1e-4)
        if want.confidence_logits is None:
            largest = np.sort(found.draft_logits[index], axis=-1)[..., -2:]  # without a head: the margin
            np.testing.assert_allclose(found.confidence_logits[index], largest[:, 1] - largest[:, 0], atol=1e-5)
        else:
            np.testing.assert_allclose(found.confidence_logits[index], want.confidence_logits[0], atol=1e-4)


@pytest.mark.parametrize("case", [*CASES, *BLOCK_FORMS])
def test_equals_the_drafter_without_cache_over_steps_with_rejections(case: str, tmp_path: Path) -> None:
    engine, expected = open_pair(tmp_path, form=BLOCK_FORMS.get(case), **CASES.get(case, {}))
    random = np.random.default_rng(5)

    def taps(count: int) -> np.ndarray:
        return random.normal(0, 1, (count, len(TAPS) * HIDDEN)).astype(np.float32)

    contexts = {3: taps(11), 0: taps(4), 1: taps(1)}
    ingest(engine, (0, 0, contexts[0]), (3, 0, contexts[3][:6]), (1, 0, contexts[1]))
    ingest(engine, (3, 6, contexts[3][6:]))
    for _ in range(4):
        check(expected, contexts, *draft(engine, contexts, [0.0, 1.0, 0.4], random))
        for row in contexts:
            # the taps of drafts that were rejected are ingested as well, then the committed ones overwrite them
            kept, rejected = taps(random.integers(1, 4)), taps(3)
            ingest(engine, (row, len(contexts[row]), np.concatenate([kept, rejected])))
            contexts[row] = np.concatenate([contexts[row], kept])
    engine.move_row(3, 2, len(contexts[3]))
    ingest(engine, (3, 0, taps(20)))
    contexts[2] = contexts.pop(3)
    check(expected, contexts, *draft(engine, contexts, [1.0, 0.0, 0.7], random))


def test_first_block_of_a_request_without_context_sees_only_itself(tmp_path: Path) -> None:
    engine, expected = open_pair(tmp_path)
    contexts = {0: np.zeros((0, len(TAPS) * HIDDEN), np.float32)}
    check(expected, contexts, *draft(engine, contexts, [0.0], np.random.default_rng(0)))


def test_tied_target_lends_its_embedding_as_the_head(tmp_path: Path) -> None:
    engine, expected = open_pair(tmp_path, tied=True)
    contexts = {1: np.ones((5, len(TAPS) * HIDDEN), np.float32)}
    ingest(engine, (1, 0, contexts[1]))
    check(expected, contexts, *draft(engine, contexts, [0.9], np.random.default_rng(0)))


def test_non_finite_taps_never_yield_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    engine, _ = open_pair(tmp_path, head_type="rnn")
    taps = np.full((3, len(TAPS) * HIDDEN), np.nan, np.float32)
    ingest(engine, (0, 0, taps))
    _, found = draft(engine, {0: taps}, [0.8], np.random.default_rng(0))
    assert ((found.draft_ids >= 0) & (found.draft_ids < 97)).all()
    assert np.isfinite(found.draft_logits).all()
    assert not np.isfinite(found.confidence_logits).any()  # left as it is: it counts as survival 0
