"""A Gemma 4 drafter in float32, block by block, from transformers' own modules: no cache, no batch, no graph.

What DeepSpec's `Gemma4DSparkModel` computes, from the facts of its code: all layers have the full layers' heads and
rotation, values are un-normalised keys behind a norm without weight, scores are not scaled, and the cap is for the base
logits alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextMLP,
    Gemma4TextRotaryEmbedding,
    apply_rotary_pos_emb,
)

_EXTRA = ("architectures", "model_type", "target_model_type", "target_text_model_type")


class Gemma4DrafterOracle:
    """`block` drafts greedily behind a context that is given as taps."""

    def __init__(self, folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        self._tensors = load_file(folder / "model.safetensors")
        self._gamma, self._mask = values["block_size"], values["mask_token_id"]
        self._num_kv_heads = (
            values["num_global_key_value_heads"] if values["attention_k_eq_v"] else values["num_key_value_heads"]
        )
        self._head_dim, self._cap = values["global_head_dim"], values.get("final_logit_softcapping")
        plain = {key: value for key, value in values.items() if key not in _EXTRA}
        self._config = Gemma4TextConfig(**{**plain, "hidden_size_per_layer_input": 0})
        self._rotary = Gemma4TextRotaryEmbedding(self._config)

    def block(self, taps: torch.Tensor, anchor: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Taps [P, M*D] of the context -> drafts, their corrected logits [G, V] and confidence logits [G]."""
        with torch.no_grad():
            return self._block(taps, anchor)

    def _block(self, taps: torch.Tensor, anchor: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        weight = self._tensors
        tokens = torch.tensor([anchor] + [self._mask] * (self._gamma - 1))
        x = weight["embed_tokens.weight"][tokens] * self._config.hidden_size**0.5
        context = self._norm("hidden_norm", taps @ weight["fc.weight"].T)
        positions = torch.arange(len(taps) + self._gamma)[None]
        cos, sin = self._rotary(x, positions, "full_attention")
        for layer in range(self._config.num_hidden_layers):
            x = self._layer(f"layers.{layer}.", x, context, cos, sin)
        hidden = self._norm("norm", x)
        base = hidden @ weight["lm_head.weight"].T
        if self._cap is not None:
            base = torch.tanh(base / self._cap) * self._cap
        return self._heads(hidden, base, anchor)

    def _layer(
        self, at: str, x: torch.Tensor, context: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        normed = self._norm(f"{at}input_layernorm", x)
        queries = self._norm(f"{at}self_attn.q_norm", self._heads_of(f"{at}self_attn.q_proj", normed))
        both = torch.cat([context, normed])
        projected = self._heads_of(f"{at}self_attn.k_proj", both)
        name = f"{at}self_attn.v_proj"
        values = self._heads_of(name, both) if f"{name}.weight" in self._tensors else projected
        values = Gemma4RMSNorm(self._head_dim, self._config.rms_norm_eps, with_scale=False)(values)
        keys = apply_rotary_pos_emb(self._norm(f"{at}self_attn.k_norm", projected)[None], cos, sin, unsqueeze_dim=2)[0]
        begin = len(context)
        queries = apply_rotary_pos_emb(queries[None], cos[:, begin:], sin[:, begin:], unsqueeze_dim=2)[0]
        outputs = []
        for head in range(self._config.num_attention_heads):
            shared = head * self._num_kv_heads // self._config.num_attention_heads
            weights = (queries[:, head] @ keys[:, shared].T).softmax(dim=-1)
            outputs.append(weights @ values[:, shared])
        attended = self._linear(f"{at}self_attn.o_proj", torch.cat(outputs, dim=-1))
        x = x + self._norm(f"{at}post_attention_layernorm", attended)
        mlp = Gemma4TextMLP(self._config, 0)
        mlp.load_state_dict(
            {key.removeprefix(f"{at}mlp."): each for key, each in self._tensors.items() if f"{at}mlp." in key}
        )
        output = mlp(self._norm(f"{at}pre_feedforward_layernorm", x))
        x = x + self._norm(f"{at}post_feedforward_layernorm", output)
        return x * self._tensors[f"{at}layer_scalar"]

    def _heads(
        self, hidden: torch.Tensor, base: torch.Tensor, anchor: int
    ) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        drafts, logits, confidences, previous = [], [], [], anchor
        for slot in range(self._gamma):
            embedded = self._tensors["markov_head.markov_w1.weight"][previous]
            logits.append(base[slot] + self._tensors["markov_head.markov_w2.weight"] @ embedded)
            features = torch.cat([hidden[slot], embedded])
            confidences.append(
                self._linear("confidence_head.proj", features)[0] + self._tensors["confidence_head.proj.bias"][0]
            )
            previous = int(logits[-1].argmax())
            drafts.append(previous)
        return drafts, torch.stack(logits), torch.stack(confidences)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = Gemma4RMSNorm(x.shape[-1], self._config.rms_norm_eps)
        norm.load_state_dict({"weight": self._tensors[f"{name}.weight"]})
        normed: torch.Tensor = norm(x)
        return normed

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self._tensors[f"{name}.weight"].T

    def _heads_of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._linear(name, x).unflatten(-1, (-1, self._head_dim))
