"""The drafter in PyTorch, for training: parameters are named as in DeepSpec's checkpoints (paper, section 3.1).

Shape letters: `B` answers of a batch, `A` blocks of an answer, `n` slots of a block, `S` = A * n slots of an answer,
`P` context positions, `D` hidden size, `V` vocabulary, `C` draft vocabulary, `r` Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dspark_trt.checkpoints.layout import EMBEDDING
from dspark_trt.checkpoints.spec import BlockDrafterSpec, DecoderSpec, DrafterCheckpoint, TargetCheckpoint
from dspark_trt.errors import CheckpointError


@dataclass(frozen=True)
class BlockInput:
    """What the parallel stage reads."""

    slot_ids: torch.Tensor  # [B, S] int64: the anchor, then masks, of every block
    slot_positions: torch.Tensor  # [B, S] int64: absolute
    taps: torch.Tensor  # [B, P, taps * D]
    is_visible: torch.Tensor  # [B, 1, S, P + S] bool: context below the anchor, and the slots of the own block


class Drafter(nn.Module):
    """`embedding` [V, D] is the target's, its head as well; both stay as they are."""

    def __init__(self, spec: BlockDrafterSpec, embedding: torch.Tensor) -> None:
        """Raises CheckpointError for a form of drafter that this recipe does not train."""
        super().__init__()
        is_known = spec.markov_head_type == "vanilla" and spec.markov_rank and spec.is_confidence_with_markov
        is_plain = spec.is_plain_attention and not spec.is_mask_first
        if not is_known or not is_plain or not spec.has_confidence_bias or spec.has_own_embedding or spec.has_own_head:
            raise CheckpointError(
                "the recipe trains anchor-first drafters with a vanilla Markov head, a confidence head with Markov "
                f"input and bias, full attention, and the target's own embedding and head; found {spec}"
            )
        decoder, width = spec.decoder, spec.decoder.hidden_size
        self.spec = spec
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.fc = nn.Linear(spec.num_taps * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=decoder.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(decoder) for _ in range(decoder.num_layers))
        self.norm = nn.RMSNorm(width, eps=decoder.rms_norm_eps)
        self.markov_head = nn.ModuleDict(
            {
                "markov_w1": nn.Embedding(decoder.vocab_size, spec.markov_rank),
                "markov_w2": nn.Linear(spec.markov_rank, decoder.vocab_size, bias=False),
            }
        )
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width + spec.markov_rank, 1)})

    def hidden(self, block: BlockInput) -> torch.Tensor:
        """The parallel stage (eq. 2-3): [B, S, D], after the final norm."""
        context = self.hidden_norm(self.fc(block.taps))
        slots = _rotation(block.slot_positions, self.spec.decoder)
        positions = torch.arange(block.taps.shape[1], device=block.taps.device)[None]
        rotations = _Rotations(slots, _rotation(positions, self.spec.decoder))
        x = functional.embedding(block.slot_ids, cast(torch.Tensor, self.embedding))
        for layer in self.layers:
            x = layer(x, context, rotations, block.is_visible)
        return cast(torch.Tensor, self.norm(x))

    def markov_embedding(self, previous_ids: torch.Tensor) -> torch.Tensor:
        """W1[x_{j-1}]: [...] -> [..., r]."""
        return cast(torch.Tensor, self.markov_head["markov_w1"](previous_ids))

    def logits(self, hidden: torch.Tensor, previous: torch.Tensor, draft_vocab: torch.Tensor) -> torch.Tensor:
        """Base logits plus Markov bias (eq. 4-6) over `draft_vocab` [C]: hidden [..., D], previous [..., r] -> [...,
        C]."""
        head = cast(torch.Tensor, self.embedding)[draft_vocab]
        bias = cast(nn.Linear, self.markov_head["markov_w2"]).weight[draft_vocab]
        return functional.linear(hidden, head) + functional.linear(previous, bias)

    def confidence_logits(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Eq. 7: [...]."""
        return cast(torch.Tensor, self.confidence_head["proj"](torch.cat([hidden, previous], dim=-1)).squeeze(-1))


def load_drafter(checkpoint: DrafterCheckpoint, embedding: torch.Tensor) -> Drafter:
    """A drafter with the weights of a checkpoint, in float32."""
    drafter = Drafter(checkpoint.spec, embedding)
    names = checkpoint.weights.names()
    state = {name: torch.from_numpy(np.array(checkpoint.weights.array(name), dtype=np.float32)) for name in names}
    drafter.load_state_dict(state)
    return drafter


def target_embedding(target: TargetCheckpoint) -> torch.Tensor:
    """[V, D] float32, a copy: stored arrays may be read-only maps."""
    return torch.from_numpy(np.array(target.weights.array(EMBEDDING), dtype=np.float32))


@dataclass(frozen=True)
class _Rotations:
    """cos and sin, [B or 1, 1, positions, head dim], of the slots and of the context."""

    slots: tuple[torch.Tensor, torch.Tensor]
    context: tuple[torch.Tensor, torch.Tensor]


class _Layer(nn.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = _Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = _Mlp(spec)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, rotations: _Rotations, is_visible: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotations, is_visible)
        return cast(torch.Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class _Attention(nn.Module):
    """Keys and values come from the context, which passes no input norm, and from the slots."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self._head_dim = spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, spec.num_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, rotations: _Rotations, is_visible: torch.Tensor
    ) -> torch.Tensor:
        queries = _rotate(self.q_norm(self._heads(self.q_proj(x))), rotations.slots)
        sources = ((context, rotations.context), (x, rotations.slots))
        keys = [_rotate(self.k_norm(self._heads(self.k_proj(rows))), rotation) for rows, rotation in sources]
        values = [self._heads(self.v_proj(rows)) for rows, _ in sources]
        attended = functional.scaled_dot_product_attention(
            queries, torch.cat(keys, dim=2), torch.cat(values, dim=2), attn_mask=is_visible, enable_gqa=True
        )
        return cast(torch.Tensor, self.o_proj(attended.transpose(1, 2).flatten(2)))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)  # [B, heads, positions, head dim]


class _Mlp(nn.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)))


def _rotation(positions: torch.Tensor, spec: DecoderSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE (arXiv 2104.09864): cos and sin of [B, positions], each [B, 1, positions, head dim]."""
    channels = torch.arange(0, spec.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * spec.rope.theta ** (-channels / spec.head_dim)
    both_halves = torch.cat([angles, angles], dim=-1)[:, None]
    return both_halves.cos(), both_halves.sin()


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = (wave.to(x.dtype) for wave in rotation)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
