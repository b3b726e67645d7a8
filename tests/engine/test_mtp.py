"""MiMo's MTP module: the target without it is Qwen2's, drafts and logits equal an oracle of transformers' own layer
over steps with rejections, and the loop gives the target's own tokens and distribution."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from dspark_trt.checkpoints.drafter import read_drafter, read_drafter_spec
from dspark_trt.checkpoints.drafters.writing import write_drafter
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import Eagle3Spec
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.protocol import DraftBatch, EngineLimits, IngestBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import CheckpointError
from dspark_trt.reference.engines import open_reference_engines
from tests.engine.test_gemma4_pair import called
from tests.support.conversations import Conversations, open_pair, open_target
from tests.support.device_cases import LIMITS as SMALL_LIMITS
from tests.support.device_cases import (
    VOCABULARY,
    Pair,
    check_distribution,
    device_loop,
    greedy_requests,
    oracle_tokens,
    tokens_of,
)
from tests.support.factories import write_tokenizer_files
from tests.support.transformers_targets import write_by_transformers

LIMITS = EngineLimits(max_requests=3, max_seq_len=96, max_batch_tokens=64)
PREFIX = "model.mtp_layers.0."


def write_mimo(folder: Path, *, tokenizer: bool = False, **sizes: Any) -> Path:
    """A Qwen2 target under MiMo's name, with a module beside it."""
    plain = write_by_transformers(folder.with_name(f"{folder.name}-plain"), "qwen2", **sizes)
    config = json.loads((plain / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    tensors = load_file(plain / "model.safetensors")
    random, hidden = np.random.default_rng(3), config["hidden_size"]
    of_layer = {name: each for name, each in tensors.items() if name.startswith("model.layers.0.")}
    for name, each in of_layer.items():
        other = random.standard_normal(each.shape).astype(np.float32)
        scaled = 1 + 0.1 * other if "norm" in name else other * 1.5 / each.shape[-1] ** 0.5
        tensors[name.replace("model.layers.0.", PREFIX)] = scaled
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{PREFIX}{norm}.weight"] = 1 + 0.1 * random.standard_normal(hidden).astype(np.float32)
    matrix = random.standard_normal((hidden, 2 * hidden)).astype(np.float32)
    tensors[f"{PREFIX}input_proj.weight"] = matrix * 1.5 / (2 * hidden) ** 0.5
    folder.mkdir()
    if tokenizer:
        write_tokenizer_files(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    return folder


class Oracle:
    """From all positions anew, by transformers' Qwen2 layer and norm, as MiMo's modelling code puts them together."""

    def __init__(self, folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        self._config = Qwen2Config(**{key: each for key, each in values.items() if key != "model_type"})
        self._config._attn_implementation = "eager"
        tensors = {name: torch.from_numpy(each) for name, each in load_file(folder / "model.safetensors").items()}
        self._own = {name.removeprefix(PREFIX): each for name, each in tensors.items() if name.startswith(PREFIX)}
        self._embedding = tensors["model.embed_tokens.weight"]
        self._head = tensors.get("lm_head.weight", self._embedding)
        self._layer = Qwen2DecoderLayer(self._config, 0)
        names = self._layer.state_dict()
        self._layer.load_state_dict({name: self._own[name] for name in names})

    def block(self, states: torch.Tensor, next_ids: list[int], num_drafts: int) -> tuple[list[int], torch.Tensor]:
        """States [P, D] and the token behind each position -> drafts and their logits [n, V]."""
        tokens, drafts, logits = list(next_ids), [], []
        with torch.no_grad():
            for _ in range(num_drafts):
                output = self._output(states, torch.tensor(tokens))[-1]
                logits.append(output @ self._head.T)
                drafts.append(int(logits[-1].argmax()))
                tokens.append(drafts[-1])
                states = torch.cat([states, output[None]])
        return drafts, torch.stack(logits)

    def _output(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        both = self._norm("hidden_layernorm", states), self._norm("token_layernorm", self._embedding[tokens])
        x = (torch.cat(both, dim=-1) @ self._own["input_proj.weight"].T)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        rotation = Qwen2RotaryEmbedding(self._config)(x, positions)
        x = self._layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return self._norm("final_layernorm", (x[0] if isinstance(x, tuple) else x)[0])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = Qwen2RMSNorm(x.shape[-1], self._config.rms_norm_eps)
        norm.load_state_dict({"weight": self._own[f"{name}.weight"]})
        normed: torch.Tensor = norm(x)
        return normed


def open_mimo(folder: Path, num_drafts: int | None = None) -> Pair:
    target = read_target(str(folder))
    drafter = read_drafter(str(folder), target, num_drafts=num_drafts)
    check_pairing(target, drafter)
    return Pair(target, drafter)


def test_the_target_is_qwen2s_and_the_module_a_drafter(tmp_path: Path) -> None:
    folder = write_mimo(tmp_path / "mimo")
    pair = open_mimo(folder)
    assert not [name for name in pair.target.weights.names() if "mtp" in name]
    spec = pair.drafter.spec
    assert isinstance(spec, Eagle3Spec)
    assert (spec.gamma, spec.target_layer_ids, spec.is_last_tap_normed) == (1, (3,), True)
    assert read_drafter_spec(str(folder), pair.target.spec, num_drafts=3).gamma == 3
    engine = open_target(pair.target, tmp_path / "graphs", taps=(3,), norm_last_tap=True, limits=LIMITS)
    step = Conversations(num_rows=1, vocab_size=97).step([0], [11], num_decode=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mimo-plain", dtype=torch.float32)
    with torch.no_grad():
        output = model(torch.from_numpy(step.batch.token_ids)[None], output_hidden_states=True)
    found = engine.forward(step.batch)
    np.testing.assert_allclose(found.taps, output.hidden_states[-1][0], atol=1e-4, rtol=0)
    rows = output.logits[0][step.batch.logit_rows]
    np.testing.assert_allclose(found.logits, rows, atol=1e-4, rtol=0)


def test_drafts_and_logits_equal_the_oracles_over_steps_with_rejections(tmp_path: Path) -> None:
    folder = write_mimo(tmp_path / "mimo")
    pair = open_mimo(folder, num_drafts=4)
    engines = (
        open_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=LIMITS)[1],
        open_reference_engines(pair.target, pair.drafter, limits=LIMITS)[1],
    )
    oracle, random, zeros = Oracle(folder), np.random.default_rng(0), np.zeros((1, 4), np.float32)
    states, ids = np.empty((0, 32), np.float32), [5]
    for count in (7, 1, 4, 2):
        new, past = random.standard_normal((count, 32)).astype(np.float32), np.array([len(states)])
        behind = random.integers(0, 97, count)
        here = np.array([ids[-1], *behind[:-1]])
        states, ids = np.concatenate([states, new]), [*ids, *behind.tolist()]
        drafts, logits = oracle.block(torch.from_numpy(states), ids[1:], 4)
        for engine in engines:
            engine.ingest(IngestBatch(new, np.array([0]), past, np.array([count]), here, behind))
            batch = DraftBatch(np.array([0]), np.array(ids[-1:]), np.array([len(states)]), zeros[:, 0], zeros)
            output = engine.draft(batch)
            assert output.draft_logits is not None
            np.testing.assert_array_equal(output.draft_ids[0], drafts)
            np.testing.assert_allclose(output.draft_logits[0], logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_greedy_texts_are_the_targets(num_drafts: int, tmp_path: Path) -> None:
    pair = open_mimo(write_mimo(tmp_path / "mimo", vocab_size=VOCABULARY), num_drafts)
    engines: Any = open_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=SMALL_LIMITS)
    engines = SimpleNamespace(target=engines[0], drafter=engines[1], step=None, acceptance=None, pages=None)
    expected = oracle_tokens(pair, greedy_requests())
    for mode in ("fixed", "early_stop"):
        loop = device_loop(engines, SchedulerConfig(mode))  # type: ignore[arg-type]
        assert tokens_of(loop, greedy_requests()) == expected
        assert loop.totals.num_drafts_verified > 0


def test_sampled_texts_have_the_targets_distribution(tmp_path: Path) -> None:
    pair = open_mimo(write_mimo(tmp_path / "mimo", vocab_size=5), 3)
    engines: Any = open_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=SMALL_LIMITS)
    engines = SimpleNamespace(target=engines[0], drafter=engines[1], step=None, acceptance=None, pages=None)
    check_distribution(engines, pair, SchedulerConfig("early_stop"), num_samples=500)


def test_a_target_drafts_for_itself_by_one_command(tmp_path: Path) -> None:
    folder = str(write_mimo(tmp_path / "mimo", vocab_size=320, tokenizer=True, head_dim=16))
    (tmp_path / "temperatures.json").write_text(json.dumps({"temperatures": [1.0] * 2}))
    limits = "--max-requests 4 --max-seq-len 64 --max-batch-tokens 64 --num-threads 1 --num-drafts 2"
    plain = "--draft-vocab all --drafter-precision fp32 --markov-top-n 0"
    calibration = ["--calibration", str(tmp_path / "temperatures.json")]
    output = str(tmp_path / "build")
    pair = ["--target", folder, "--drafter", folder, "--output", output]
    called("build", *pair, *limits.split(), *plain.split(), *calibration)
    assert "MTP module" in called("inspect", output)
    options = "--prompts 2 --samples 2 --max-tokens 8 --modes fixed --json"
    report = json.loads(called("verify", output, *options.split()))
    assert report["has_passed"]
    assert report["modes"][0]["num_drafts_verified"] > 0


def test_several_modules_and_other_forms_are_refused(tmp_path: Path) -> None:
    folder = write_mimo(tmp_path / "mimo")
    pair = open_mimo(folder)
    for form in ("deepspec", "speculators"):
        with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers: .* no place for it|last layer"):
            write_drafter(pair.drafter, pair.target, tmp_path, form, "target")  # type: ignore[arg-type]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 3}))
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers = 3: .* several MTP modules"):
        open_mimo(folder)
