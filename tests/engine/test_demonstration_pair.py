"""The demonstration pair on ONNX Runtime, all cores, against transformers and the PyTorch oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.contract.protocol import DraftBatch, EngineLimits, IngestBatch, TargetBatch
from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeDraftEngine, OnnxRuntimeTargetEngine, open_engines
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.target import write_target_graph
from dspark_trt.reference.engines import open_reference_engines
from tests.support.conversations import read_pair

pytestmark = pytest.mark.demo

LIMITS = EngineLimits(max_requests=2, max_seq_len=256, max_batch_tokens=64)
PROMPT = [504, 6376, 314, 6050, 975, 282, 253, 1112, 1217, 29161, 3093, 22178, 28, 281, 527]
NUM_NEW_TOKENS = 16

Engines = tuple[OnnxRuntimeTargetEngine, OnnxRuntimeDraftEngine]


@pytest.fixture(scope="module")
def checkpoints(demo_target_path: Path, demo_drafter_path: Path) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    return read_pair(demo_target_path, demo_drafter_path)


@pytest.fixture(scope="module")
def engines(
    checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint], tmp_path_factory: pytest.TempPathFactory
) -> Engines:
    target, drafter = checkpoints
    folder = tmp_path_factory.mktemp("graphs")
    write_target_graph(
        target,
        folder,
        taps=drafter.spec.target_layer_ids,
        norm_last_tap=drafter.spec.is_last_tap_normed,
        limits=LIMITS,
        gamma=drafter.spec.gamma,
        precision="fp32",
        attention="gqa",
    )
    write_drafter_graphs(target, drafter, folder, limits=LIMITS, precision="fp32")
    return open_engines(folder)


def forward(engine: OnnxRuntimeTargetEngine, tokens: list[int], past: int) -> np.ndarray:
    """All logits of one request's tokens, in row 1."""
    count = len(tokens)
    batch = TargetBatch(
        np.array(tokens), np.array([1]), np.array([past]), np.array([count]), int(past > 0), np.arange(count)
    )
    return engine.forward(batch).logits


def test_greedy_tokens_and_logits_equal_transformers(
    engines: Engines, checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint]
) -> None:
    target, weights = checkpoints[0].spec.decoder, checkpoints[0].weights
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=target.num_layers,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": target.rope.theta},
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    state = {f"model.{name}": torch.from_numpy(np.array(weights.array(name))) for name in weights.names()}
    assert model.load_state_dict(state, strict=False).unexpected_keys == []
    wanted = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens: list[int] = []
    logits = forward(engines[0], PROMPT, 0)[-1]
    for expected in wanted.logits:
        assert np.abs(logits - expected[0].numpy()).max() < 2e-4
        tokens.append(int(logits.argmax()))
        logits = forward(engines[0], tokens[-1:], len(PROMPT) + len(tokens) - 1)[0]
    assert tokens == wanted.sequences[0, len(PROMPT) :].tolist()


def test_a_block_verified_at_once_equals_its_tokens_one_by_one(engines: Engines) -> None:
    """The float32 promise of the build output: greedy output does not depend on the verify length."""
    block = [260, 1693, 553, 288, 2290, 327, 260, 6170]
    forward(engines[0], PROMPT, 0)
    together = forward(engines[0], block, len(PROMPT)).copy()
    alone = np.concatenate([forward(engines[0], [token], len(PROMPT) + at).copy() for at, token in enumerate(block)])
    assert np.abs(together - alone).max() < 1e-3


def test_drafts_equal_the_oracle(engines: Engines, checkpoints: tuple[TargetCheckpoint, DrafterCheckpoint]) -> None:
    references = open_reference_engines(*checkpoints, limits=LIMITS)
    batch = TargetBatch(
        np.array(PROMPT), np.array([1]), np.array([0]), np.array([len(PROMPT)]), 0, np.array([len(PROMPT) - 1])
    )
    block = DraftBatch(
        rows=np.array([1]),
        anchor_ids=np.array([260]),
        past_lengths=np.array([len(PROMPT)]),
        temperatures=np.array([0.7], np.float32),
        uniforms=np.linspace(0.1, 0.9, 7, dtype=np.float32)[None],
    )
    outputs = []
    for target, drafter in (engines, references):
        taps = target.forward(batch).taps
        drafter.ingest(IngestBatch(taps, np.array([1]), np.array([0]), np.array([len(PROMPT)])))
        outputs.append(drafter.draft(block))
    np.testing.assert_array_equal(outputs[0].draft_ids, outputs[1].draft_ids)
    np.testing.assert_allclose(outputs[0].draft_logits, outputs[1].draft_logits, atol=1e-3, rtol=0)
    np.testing.assert_allclose(outputs[0].confidence_logits, outputs[1].confidence_logits, atol=1e-3, rtol=0)
