"""The decoder layer that target and drafter share, in plain PyTorch, in the element type of the tensors it is given.

Norms and rotation are computed in float32, by cos and sin of that type as transformers has them. Nothing here depends
on the values of a tensor, so all of it can be captured.

Shape letters: `T` tokens, `S` query tokens of one segment, `J` keys of one segment, `D` hidden, `N`/`K` query/KV heads,
`H` head dim.
"""

from __future__ import annotations

import math

import torch

from dspark_trt.checkpoints.spec import DecoderSpec, RopeSpec
from dspark_trt.reference.experts import mixture
from dspark_trt.reference.weights import ReferenceWeights


def rope_frequencies(rope: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of every pair of channels, [H / 2], and the scale of cos and sin.

    Source: RoPE (arXiv 2104.09864), Llama 3 (arXiv 2407.21783), YaRN (arXiv 2309.00071).
    """
    frequencies = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.rope_type:
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / _known(rope.factor), 1.0
        case "llama3":
            return _llama3_frequencies(rope, frequencies), 1.0
        case "yarn":
            return _yarn_frequencies(rope, frequencies, head_dim), _known(rope.attention_factor)
        case "proportional":
            num_still = head_dim // 2 - int(_known(rope.partial_rotary_factor) * head_dim // 2)
            frequencies[head_dim // 2 - num_still :] = 0
            return frequencies / _known(rope.factor), 1.0


def _llama3_frequencies(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow channels are stretched by `factor`, fast ones kept, those between blended."""
    low, high = _known(rope.low_freq_factor), _known(rope.high_freq_factor)
    turns = _known(rope.original_max_position_embeddings) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / _known(rope.factor)


def _yarn_frequencies(rope: RopeSpec, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The same with a ramp over the channels, between the ones that turn `beta_fast` and `beta_slow` times."""

    def channel(num_turns: float) -> float:
        longest_period = _known(rope.original_max_position_embeddings) / num_turns
        return head_dim * math.log(longest_period / (2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = channel(_known(rope.beta_fast)), channel(_known(rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return (1 - stretched) * frequencies + stretched * frequencies / _known(rope.factor)


def _known(parameter: float | None) -> float:
    assert parameter is not None, "the checkpoint reader fills in what a rope_type uses"
    return parameter


class ReferenceDecoder:
    """The parts of a decoder layer; who attends to whom is for the engines to say."""

    def __init__(self, spec: DecoderSpec, weights: ReferenceWeights) -> None:
        self.spec = spec
        self.weights = weights
        shapes = [spec.shape_of(layer) for layer in range(spec.num_layers)]
        ropes = {(each.rope, each.head_dim): rope_frequencies(each.rope, each.head_dim) for each in shapes}
        of_layers = [ropes[each.rope, each.head_dim] for each in shapes]
        self._ropes = [(frequencies.to(weights.device), scale) for frequencies, scale in of_layers]

    def embedded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [T, D], as they go into the first layer."""
        if self.spec.gemma is None:
            return rows
        return rows * float(torch.tensor(self.spec.hidden_size**0.5, dtype=rows.dtype))  # rounded, as transformers does

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        """Brings logits behind the soft cap, where there is one, in place."""
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.weights.rms_norm(name, x, self.spec.rms_norm_eps)

    def query(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, N, H], normalised and rotated."""
        return self._rotated_heads(layer, "q", self.spec.num_heads, x, positions)

    def key_value(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, D] -> [T, K, H] twice; keys normalised and rotated."""
        shape = self.spec.shape_of(layer)
        keys = self._rotated_heads(layer, "k", shape.num_kv_heads, x, positions)
        values = self.weights.linear(f"layers.{layer}.self_attn.{'k' if shape.is_value_of_key else 'v'}_proj", x)
        values = values.unflatten(-1, (shape.num_kv_heads, shape.head_dim))
        if self.spec.gemma is not None:
            values = torch.nn.functional.rms_norm(values.float(), values.shape[-1:], eps=self.spec.rms_norm_eps)
        return keys, values.to(x.dtype)

    def attention_output(self, layer: int, attended: torch.Tensor) -> torch.Tensor:
        """[T, N, H] -> [T, D]."""
        return self.weights.linear(f"layers.{layer}.self_attn.o_proj", attended.flatten(-2))

    def mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The feed-forward half of the layer, [T, D] -> [T, D], with its norm, without the residual."""
        is_gemma = self.spec.gemma is not None
        x = self.norm(f"layers.{layer}.{'pre_feedforward' if is_gemma else 'post_attention'}_layernorm", x)
        if (experts := self.spec.experts_of(layer)) is not None:
            return mixture(self.weights, experts, f"layers.{layer}.mlp", x)
        gate = self.weights.linear(f"layers.{layer}.mlp.gate_proj", x)
        gate = torch.nn.functional.gelu(gate, approximate="tanh") if is_gemma else torch.nn.functional.silu(gate)
        return self.weights.linear(
            f"layers.{layer}.mlp.down_proj", gate * self.weights.linear(f"layers.{layer}.mlp.up_proj", x)
        )

    def layer_output(self, layer: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What the layer makes of its input [T, D], once attention [T, N, H] is there."""
        output = self.attention_output(layer, attended)
        if self.spec.gemma is None:
            x = x + output
            return x + self.mlp(layer, x)
        x = x + self.norm(f"layers.{layer}.post_attention_layernorm", output)
        x = x + self.norm(f"layers.{layer}.post_feedforward_layernorm", self.mlp(layer, x))
        return x * self.weights[f"layers.{layer}.layer_scalar"]

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        is_visible: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[S, N, H] over [J, K, H] -> [S, N, H]; `is_visible` [S, J], everything by default. sink [N]: one more logit
        of each head, which no position stands for."""
        group = self.spec.num_heads // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        weights = torch.einsum("snh,jnh->nsj", queries, keys) * self.spec.score_scale_of(layer)
        if is_visible is not None:
            weights = weights.masked_fill(~is_visible, -torch.inf)
        if sink is not None:
            weights = torch.cat([weights, sink[:, None, None].expand(-1, weights.shape[1], 1)], dim=-1)
        return torch.einsum("nsj,jnh->snh", weights.softmax(dim=-1)[..., : len(keys)], values)

    def _rotated_heads(
        self, layer: int, which: str, num_heads: int, x: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        name, head_dim = f"layers.{layer}.self_attn.{which}", self.spec.shape_of(layer).head_dim
        heads = self.weights.linear(f"{name}_proj", x).unflatten(-1, (num_heads, head_dim))
        if self.spec.has_qk_norm:
            heads = self.norm(f"{name}_norm", heads)
        frequencies, rope_scale = self._ropes[layer]
        angles = positions[:, None, None].to(torch.float32) * frequencies  # [T, 1, H / 2]
        cos, sin = ((wave * rope_scale).to(heads.dtype) for wave in (angles.cos(), angles.sin()))
        first, second = heads.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


class ReferenceCache:
    """K and V of every row, an array for each layer: [K or V, row, position, K, H]."""

    def __init__(self, spec: DecoderSpec, max_requests: int, max_seq_len: int, device: str) -> None:
        shapes = [spec.shape_of(layer) for layer in range(spec.num_layers)]
        self._memory = [
            torch.zeros((2, max_requests, max_seq_len, each.num_kv_heads, each.head_dim), device=device)
            for each in shapes
        ]

    def write(self, layer: int, row: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write [S, K, H] at positions [start, start + S)."""
        end = start + len(keys)
        self._memory[layer][0, row, start:end] = keys
        self._memory[layer][1, row, start:end] = values

    def read(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at positions [0, length)."""
        return self._memory[layer][0, row, :length], self._memory[layer][1, row, :length]

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        for memory in self._memory:
            memory[:, destination, :num_positions] = memory[:, source, :num_positions]
