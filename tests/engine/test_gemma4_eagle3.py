"""DeepSpec's EAGLE-3 drafter of Gemma 4: drafts and logits equal to an oracle of transformers' own modules over steps
with rejections, and the target's own tokens and distribution through the loop and the commands."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextMLP,
    Gemma4TextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from dspark_trt.checkpoints.drafters.writing import write_drafter
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import Eagle3Spec
from dspark_trt.contract.protocol import DraftBatch, EngineLimits, IngestBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import CheckpointError, PairingError
from dspark_trt.reference.engines import open_reference_engines
from tests.engine.test_gemma4_pair import called
from tests.support.conversations import open_pair, read_pair
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
from tests.support.factories import write_target
from tests.support.gemma4 import write_gemma_drafter, write_gemma_eagle3, write_gemma_target

LIMITS = EngineLimits(max_requests=3, max_seq_len=96, max_batch_tokens=64)
CASES: dict[str, dict[str, Any]] = {
    "12B form": {},
    "values of their own, no cap, own embedding": {
        "target": {"attention_k_eq_v": False, "final_logit_softcapping": None},
        "drafter": {"has_own_embedding": True},
    },
    "head_dim 12, which falls back": {"target": {"global_head_dim": 12}},
}


class Oracle:
    """One greedy draft after the other, from all positions anew: what DeepSpec's model computes, from its code."""

    def __init__(self, folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        self._tensors = load_file(folder / "model.safetensors")
        extra = ("architectures", "model_type", "target_model_type", "target_text_model_type")
        plain = {key: value for key, value in values.items() if key not in extra}
        self._config = Gemma4TextConfig(**{**plain, "hidden_size_per_layer_input": 0})
        self._head_dim, self._cap = values["global_head_dim"], values.get("final_logit_softcapping")

    def block(self, taps: torch.Tensor, next_ids: list[int], num_drafts: int) -> tuple[list[int], torch.Tensor]:
        """Taps [P, M*D] and the token behind each position -> drafts and their logits [n, V]."""
        features, tokens = taps @ self._tensors["fc.weight"].T, list(next_ids)
        drafts, logits = [], []
        with torch.no_grad():
            for _ in range(num_drafts):
                output = self._layer(features, torch.tensor(tokens))[-1]
                slot = self._norm("norm", output) @ self._tensors["lm_head.weight"].T
                logits.append(slot if self._cap is None else torch.tanh(slot / self._cap) * self._cap)
                drafts.append(int(logits[-1].argmax()))
                tokens.append(drafts[-1])
                features = torch.cat([features, output[None]])
        return drafts, torch.stack(logits)

    def _layer(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        at, config = "layers.0.", self._config
        embedded = self._tensors["embed_tokens.weight"][tokens] * config.hidden_size**0.5
        x = torch.cat([self._norm(f"{at}input_layernorm", embedded), self._norm(f"{at}hidden_norm", features)], dim=-1)
        keys = self._heads(f"{at}self_attn.k_proj", x)
        name = f"{at}self_attn.v_proj"
        values = self._heads(name, x) if f"{name}.weight" in self._tensors else keys
        values = Gemma4RMSNorm(self._head_dim, config.rms_norm_eps, with_scale=False)(values)
        queries = self._norm(f"{at}self_attn.q_norm", self._heads(f"{at}self_attn.q_proj", x))
        rotary = Gemma4TextRotaryEmbedding(config)
        cos, sin = rotary(x[None], torch.arange(len(x))[None], "full_attention")
        keys, queries = (
            apply_rotary_pos_emb(each[None], cos, sin, unsqueeze_dim=2)[0]
            for each in (self._norm(f"{at}self_attn.k_norm", keys), queries)
        )
        group = queries.shape[1] // keys.shape[1]
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries.transpose(0, 1),
            keys.repeat_interleave(group, dim=1).transpose(0, 1),
            values.repeat_interleave(group, dim=1).transpose(0, 1),
            is_causal=True,
            scale=1.0,
        )
        output = attended.transpose(0, 1).flatten(1) @ self._tensors[f"{at}self_attn.o_proj.weight"].T
        x = features + self._norm(f"{at}post_attention_layernorm", output)
        mlp = Gemma4TextMLP(config, 0)
        prefix = f"{at}mlp."
        mlp.load_state_dict({k.removeprefix(prefix): v for k, v in self._tensors.items() if k.startswith(prefix)})
        normed = self._norm(f"{at}pre_feedforward_layernorm", x)
        x = x + self._norm(f"{at}post_feedforward_layernorm", mlp(normed))
        return x * self._tensors[f"{at}layer_scalar"]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = Gemma4RMSNorm(x.shape[-1], self._config.rms_norm_eps)
        norm.load_state_dict({"weight": self._tensors[f"{name}.weight"]})
        normed: torch.Tensor = norm(x)
        return normed

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return (x @ self._tensors[f"{name}.weight"].T).unflatten(-1, (-1, self._head_dim))


@pytest.mark.parametrize("case", CASES)
def test_drafts_and_logits_equal_the_oracles_over_steps_with_rejections(case: str, tmp_path: Path) -> None:
    target_folder = write_gemma_target(tmp_path / "target", **CASES[case].get("target", {}))
    folder = write_gemma_eagle3(tmp_path / "drafter", target_folder, **CASES[case].get("drafter", {}))
    target, drafter = read_pair(target_folder, folder)
    assert isinstance(drafter.spec, Eagle3Spec)
    assert (drafter.spec.gamma, drafter.spec.target_layer_ids) == (5, (0, 1, 3))
    assert drafter.spec.is_last_tap_normed
    engines = (
        open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)[1],
        open_reference_engines(target, drafter, limits=LIMITS)[1],
    )
    oracle, random = Oracle(folder), np.random.default_rng(0)
    taps_of = [np.empty((0, 3 * 32), np.float32) for _ in range(LIMITS.max_requests)]
    tokens_of: list[list[int]] = [[int(random.integers(0, 97))] for _ in range(LIMITS.max_requests)]
    for _ in range(4):
        rows = random.permutation(LIMITS.max_requests)[: random.integers(1, LIMITS.max_requests + 1)]
        lengths = random.integers(1, 9, len(rows))
        past = np.array([len(taps_of[row]) for row in rows])
        taps = random.standard_normal((lengths.sum(), 96)).astype(np.float32)
        token_ids, next_ids = [], []
        for row, length, new in zip(rows, lengths, np.split(taps, np.cumsum(lengths)[:-1]), strict=True):
            taps_of[row] = np.concatenate([taps_of[row], new])
            committed = [tokens_of[row][-1], *random.integers(0, 97, length).tolist()]
            token_ids += committed[:-1]
            next_ids += committed[1:]
            tokens_of[row] += committed[1:]
        anchors = np.array([tokens_of[row][-1] for row in rows])
        zeros = np.zeros((len(rows), 5), np.float32)
        ingest = IngestBatch(taps, rows, past, lengths, np.array(token_ids), np.array(next_ids))
        for engine in engines:
            engine.ingest(ingest)
            output = engine.draft(DraftBatch(rows, anchors, past + lengths, zeros[:, 0], zeros))
            assert output.draft_logits is not None
            for index, row in enumerate(rows):
                drafts, logits = oracle.block(torch.from_numpy(taps_of[row]), tokens_of[row][1:], 5)
                np.testing.assert_array_equal(output.draft_ids[index], drafts)
                np.testing.assert_allclose(output.draft_logits[index], logits, atol=1e-4, rtol=0)


def open_small(folder: Path, vocab_size: int) -> tuple[Any, Pair]:
    target_folder = write_gemma_target(folder / "target", vocab_size=vocab_size, final_logit_softcapping=3.0)
    pair = Pair(*read_pair(target_folder, write_gemma_eagle3(folder / "drafter", target_folder)))
    target, drafter = open_pair(pair.target, pair.drafter, folder / "graphs", limits=SMALL_LIMITS)
    return SimpleNamespace(target=target, drafter=drafter, step=None, acceptance=None, pages=None), pair


def test_greedy_texts_are_the_targets_in_every_mode(tmp_path: Path) -> None:
    engines, pair = open_small(tmp_path, VOCABULARY)
    expected = oracle_tokens(pair, greedy_requests())
    modes = [SchedulerConfig("fixed", verify_len=length) for length in (1, 3, 5)]
    for scheduler in (*modes, SchedulerConfig("early_stop"), SchedulerConfig("lagged_budget")):
        loop = device_loop(engines, scheduler)
        assert tokens_of(loop, greedy_requests()) == expected
        assert loop.totals.num_drafts_verified > 0


@pytest.mark.parametrize("mode", ["fixed", "early_stop"])
def test_sampled_texts_have_the_targets_distribution(mode: str, tmp_path: Path) -> None:
    engines, pair = open_small(tmp_path, 5)
    check_distribution(engines, pair, SchedulerConfig(mode), num_samples=500)  # type: ignore[arg-type]


def test_a_pair_is_built_generates_and_verifies(tmp_path: Path) -> None:
    target = write_gemma_target(tmp_path / "target", "gemma4_unified", tokenizer=True, vocab_size=320)
    drafter = write_gemma_eagle3(tmp_path / "drafter", target)
    output = str(tmp_path / "build")
    (tmp_path / "temperatures.json").write_text(json.dumps({"temperatures": [1.0] * 5}))
    limits = "--max-requests 4 --max-seq-len 64 --max-batch-tokens 64 --num-threads 1"
    plain = "--draft-vocab all --drafter-precision fp32 --markov-top-n 0"
    pair = ["--target", str(target), "--drafter", str(drafter), "--output", output]
    calibration = ["--calibration", str(tmp_path / "temperatures.json")]
    called("build", *pair, *limits.split(), *plain.split(), *calibration)
    answer = json.loads(called("generate", output, "--prompt", "the quick", "--max-tokens", "8", "--json"))
    assert 0 < len(answer["token_ids"]) <= 8
    options = "--prompts 2 --samples 2 --max-tokens 8 --modes fixed --json"
    report = json.loads(called("verify", output, *options.split()))
    assert report["has_passed"]
    assert all(mode["num_drafts_verified"] > 0 for mode in report["modes"])


def test_the_form_and_back_is_the_same_and_speculators_cannot_hold_it(tmp_path: Path) -> None:
    target_folder = write_gemma_target(tmp_path / "target")
    folder = write_gemma_eagle3(tmp_path / "drafter", target_folder, taps=(0, 2))
    target, drafter = read_pair(target_folder, folder)
    (tmp_path / "again").mkdir()
    write_drafter(drafter, target, tmp_path / "again", "deepspec", "target")
    again = read_pair(target_folder, tmp_path / "again")[1]
    assert again.spec == drafter.spec
    assert again.weights.names() == drafter.weights.names()
    with pytest.raises(CheckpointError, match="transformer_layer_config: the drafter's layer is Gemma 4's"):
        write_drafter(drafter, target, tmp_path, "speculators", "target")


def test_layers_of_another_family_are_refused_as_a_pair(tmp_path: Path) -> None:
    gemma = write_gemma_target(tmp_path / "gemma")
    other = write_target(tmp_path / "other", family="qwen3")
    with pytest.raises(PairingError, match="the target is of another family, the drafter's layers are of Gemma 4"):
        check_pairing(*read_pair(other, write_gemma_eagle3(tmp_path / "drafter", gemma)))
    sliding = write_gemma_drafter(tmp_path / "sliding", gemma)
    config = json.loads((sliding / "config.json").read_text())
    config |= {"architectures": ["Gemma4Eagle3Model"], "layer_types": ["sliding_attention"], "num_hidden_layers": 1}
    (sliding / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"the layers of Gemma4Eagle3Model see the whole context"):
        read_pair(gemma, sliding)
