"""DART: drafts and logits of one pass over masks equal to plain PyTorch that was written from the facts of its code,
and the target's own distribution through the loop."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dspark_trt.contract.protocol import DraftBatch, IngestBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from tests.engine.test_onnxruntime_drafter import LIMITS
from tests.support.conversations import open_pair, read_pair
from tests.support.device_cases import LIMITS as SMALL_LIMITS
from tests.support.device_cases import Pair, check_distribution
from tests.support.eagle3_dialects import write_eagle3
from tests.support.factories import write_target

TAPS = {"target_layer_ids": [0, 1, 2]}


def logits_of(folder: Path, embedding: torch.Tensor, taps: torch.Tensor, next_ids: list[int]) -> torch.Tensor:
    """Taps [P, 3 * D] and the token behind each position -> logits of all drafts, [draft_length + 1, V]."""
    config = json.loads((folder / "config.json").read_text())
    weight = load_file(folder / "model.safetensors")
    masks, head_dim, hidden = config["draft_length"], config["head_dim"], config["hidden_size"]
    theta = config.get("rope_parameters", config).get("rope_theta", 10000.0)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (hidden,), weight[f"{name}.weight"], config["rms_norm_eps"])

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, head_dim, 2) / head_dim)
        cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    features = taps @ weight["fc.weight"].T
    at = "midlayer"
    normed = norm(f"{at}.hidden_norm", features)
    joined = torch.cat([norm(f"{at}.input_layernorm", embedding[next_ids]), normed], dim=-1)
    mask = weight[f"{at}.mask_rep"]
    joined = torch.cat([joined, mask.expand(masks, -1)])
    residual = torch.cat([features, mask[:hidden].expand(masks, -1)])
    query, key, value = (
        (joined @ weight[f"{at}.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, head_dim)) for name in "qkv"
    )
    group = query.shape[1] // key.shape[1]
    attended = torch.nn.functional.scaled_dot_product_attention(
        rotated(query).transpose(0, 1),
        rotated(key).repeat_interleave(group, dim=1).transpose(0, 1),
        value.repeat_interleave(group, dim=1).transpose(0, 1),
        is_causal=True,
    )
    x = residual + attended.transpose(0, 1).flatten(1) @ weight[f"{at}.self_attn.o_proj.weight"].T
    x = x[-masks - 1 :]
    normed = norm(f"{at}.post_attention_layernorm", x)
    gate, up = (normed @ weight[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (torch.nn.functional.silu(gate) * up) @ weight[f"{at}.mlp.down_proj.weight"].T
    return norm("norm", norm("norm", x)) @ weight["lm_head.weight"].T


def test_drafts_and_logits_are_those_of_its_code_over_steps_with_rejections(tmp_path: Path) -> None:
    target_folder = write_target(tmp_path / "target", family="qwen3")
    folder = write_eagle3(tmp_path / "drafter", target_folder, "dart", extra=TAPS)
    target, drafter = read_pair(target_folder, folder)
    _, engine = open_pair(target, drafter, tmp_path / "graphs", limits=LIMITS)
    embedding = torch.from_numpy(np.array(target.weights.array("embed_tokens.weight")))
    taps, ids = np.empty((0, 96), np.float32), [5]
    random, zeros = np.random.default_rng(1), np.zeros((1, 5), np.float32)
    for count in (7, 1, 4, 2):
        new, past = random.standard_normal((count, 96)).astype(np.float32), np.array([len(taps)])
        behind = random.integers(0, 97, count)
        here = np.array([ids[-1], *behind[:-1]])
        ingest = IngestBatch(new, np.array([0]), past, np.array([count]), here, behind)
        engine.ingest(ingest)
        taps, ids = np.concatenate([taps, new]), [*ids, *behind.tolist()]
        output = engine.draft(DraftBatch(np.array([0]), np.array(ids[-1:]), np.array([len(taps)]), zeros[:, 0], zeros))
        assert output.draft_logits is not None
        with torch.no_grad():
            expected = logits_of(folder, embedding, torch.from_numpy(taps), ids[1:]).numpy()
        np.testing.assert_allclose(output.draft_logits[0], expected, atol=1e-4, rtol=0)
        np.testing.assert_array_equal(output.draft_ids[0], expected.argmax(axis=-1))


@pytest.mark.parametrize("mode", ["fixed", "early_stop"])
def test_sampled_texts_have_the_targets_distribution(mode: str, tmp_path: Path) -> None:
    """Chi-square: the drafts of one pass do not know each other, and each is drawn from its own logits."""
    target_folder = write_target(tmp_path / "target", family="qwen3", vocab_size=5)
    folder = write_eagle3(tmp_path / "drafter", target_folder, "dart", extra=TAPS)
    pair = Pair(*read_pair(target_folder, folder))
    engines: Any = open_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=SMALL_LIMITS)
    engines = SimpleNamespace(target=engines[0], drafter=engines[1], step=None, acceptance=None, pages=None)
    check_distribution(engines, pair, SchedulerConfig(mode), num_samples=500)  # type: ignore[arg-type]
