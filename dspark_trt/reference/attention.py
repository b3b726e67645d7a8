"""Who sees whom in a draft block, and attention of one row group of `bindings` in PyTorch: what
graphs/attention_standard.py says, with the same memory.

Nothing here waits for the device, depends on the values of a tensor or makes a shape out of them: a call can be
captured in a CUDA graph. Its cost follows the capacity of a row, as that of any mask over a whole row does.

Shape letters: `T` packed tokens, `B` rows and `S` padded query length of the group, `N`/`K` query/KV heads, `H` head
dim, `C` row capacity.
"""

from __future__ import annotations

import torch

from dspark_trt.checkpoints.layout import SINK
from dspark_trt.checkpoints.spec import BlockAttention, BlockDrafterSpec, DecoderSpec
from dspark_trt.reference.weights import ReferenceWeights


def causal_limits(past_lengths: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The last position that each padded query sees, [B, S]: its own."""
    return past_lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)


def seen_by_tokens(positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which positions each of a row's last tokens, at `positions` [S], sees: [S, positions of the row]."""
    distance = positions[:, None] - torch.arange(int(positions[-1]) + 1, device=positions.device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def seen_by_block(form: BlockAttention, past: int, positions: torch.Tensor) -> torch.Tensor:
    """Which of the `past` context positions and its own `positions` [n] each place of a block sees, [n, past + n]."""
    keys, queries = torch.arange(past + len(positions), device=positions.device), positions[:, None]
    visible = keys <= (queries if form.is_causal else positions[-1])
    if form.window is not None:
        near_slot, near_anchor = queries - keys < form.window, keys >= past - form.window
        visible = visible & (near_slot if form.window_from == "slot" else near_anchor)
    return visible.expand(len(positions), -1)


def sink_of(spec: BlockDrafterSpec, weights: ReferenceWeights, layer: int) -> torch.Tensor | None:
    """One more logit in the softmax of each head [N], which no position stands for; None where the layer has none."""
    return weights[SINK.format(layer)] if spec.attention_of(layer).has_sink else None


class RowGroupAttention:
    """The padded rows of one call. `mask_to` makes the mask that `attend` takes."""

    def __init__(
        self,
        spec: DecoderSpec,
        tokens: torch.Tensor,
        past_lengths: torch.Tensor,
        query_lengths: torch.Tensor,
        max_seq_len: int,
    ) -> None:
        """`tokens` [B, S]: packed index of each padded query. Lengths [B]; a row without tokens has query length 0.

        Such a row is written from `max_seq_len` on, where no valid position can stand.
        """
        self._spec = spec
        self._tokens = tokens
        is_idle = query_lengths == 0
        self._is_idle = is_idle[:, None, None, None]
        begin = past_lengths.masked_fill(is_idle, max_seq_len)
        self._positions = begin[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # [B, S]

    def write(self, cache: torch.Tensor, packed: torch.Tensor) -> None:
        """Put [T, K, H] into the rows [B, K, C, H], padding too: it stands behind the valid positions.

        Zeros go into rows without tokens: a NaN of another request would get through the mask.
        """
        padded = packed[self._tokens].transpose(1, 2).masked_fill(self._is_idle, 0)  # [B, K, S, H]
        cache.scatter_(2, self._positions[:, None, :, None].expand(padded.shape), padded)

    def mask_to(
        self,
        last_seen: torch.Tensor,
        capacity: int,
        first_seen: torch.Tensor | None = None,
        num_kv_heads: int | None = None,
    ) -> torch.Tensor:
        """True where a query may look, [B, 1, N / K * S, C], from the last position that each sees, [B, S], and the
        first one. `num_kv_heads` K where it is not that of the specification."""
        positions = torch.arange(capacity, device=last_seen.device)
        is_visible = positions <= last_seen[:, :, None]  # [B, S, C]
        if first_seen is not None:
            is_visible = is_visible & (positions >= first_seen[:, :, None])
        group = self._spec.num_heads // (num_kv_heads or self._spec.num_kv_heads)
        return is_visible[:, None].expand(-1, group, -1, -1).flatten(1, 2)[:, None]

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queries [T, N, H] over the rows [B, K, C, H] -> [B * S, N, H]. `scale` of the scores; `sink` [N]: see
        `sink_of`.

        The query heads that share a KV head stand one behind the other as more queries of it, so that no key is copied.
        """
        (rows, num_queries), num_heads = self._tokens.shape, self._spec.num_heads
        _, num_kv_heads, _, head_dim = keys.shape
        group = num_heads // num_kv_heads
        padded = queries[self._tokens].unflatten(2, (num_kv_heads, group))  # [B, S, K, N / K, H]
        folded = padded.permute(0, 2, 3, 1, 4).reshape(rows, num_kv_heads, group * num_queries, head_dim)
        if sink is None:
            attend = torch.nn.functional.scaled_dot_product_attention
            attended = attend(folded, keys, values, attn_mask=mask, scale=scale)
        else:
            scores = (folded @ keys.transpose(2, 3)).float() * scale
            of_queries = sink.float().unflatten(0, (num_kv_heads, group)).repeat_interleave(num_queries, dim=1)
            columns = of_queries[None, :, :, None].expand(rows, -1, -1, -1)
            weights = torch.cat([scores.masked_fill(~mask, -torch.inf), columns], dim=-1).softmax(dim=-1)
            attended = weights[..., :-1].to(values.dtype) @ values
        unfolded = attended.unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4)  # [B, S, K, N / K, H]
        return unfolded.reshape(rows * num_queries, num_heads, head_dim)
