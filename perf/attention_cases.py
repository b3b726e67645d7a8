"""RowAttention in the plugins' microbenchmark: inputs, the bytes that have to move, and the same in plain torch.

Shape letters: `B` rows, `N` query heads, `K` KV heads, `S` padded query length, `C` row capacity, `H` head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from dspark_trt_plugins.operation import ELEMENT_BYTES
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation

Tensors = dict[str, torch.Tensor]


def attention_floor_bytes(operation: RowAttentionOperation, num_rows: int, num_live: int) -> int:
    """Live keys and values once, queries and output once."""
    form, extents = operation.form, {"B": num_rows, "S": operation.form.num_slots}
    caches = ("keys", "values")
    others = sum(t.num_bytes(extents) for t in (*operation.inputs, *operation.outputs) if t.name not in caches)
    position_bytes = form.num_kv_heads * form.head_dim * ELEMENT_BYTES[form.element_type]
    return others + len(caches) * num_rows * num_live * position_bytes


def attention_inputs(operation: RowAttentionOperation, num_rows: int, num_live: int, device: str) -> Tensors:
    """Random inputs of rows of equal length, whose last query sees `num_live` positions."""
    torch.manual_seed(0)
    form, extents = operation.form, {"B": num_rows, "S": operation.form.num_slots}
    tensors = {
        tensor.name: torch.randn(tensor.shape_in(extents), dtype=getattr(torch, tensor.element_type), device=device)
        for tensor in operation.inputs
        if tensor.name != "last_seen"
    }
    last_seen = torch.arange(num_live - form.num_slots, num_live, device=device).repeat(num_rows, 1)
    return {**tensors, "last_seen": last_seen}


def torch_row_attention(form: RowAttentionForm, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """scaled_dot_product_attention over the whole capacity under a mask.

    Queries that share a key head stand as more slots of it, which is a view: so torch need not repeat the caches, and
    any of its kernels that take a mask can be chosen.
    """
    query, last_seen = inputs["query"], inputs["last_seen"]
    num_rows, _, num_slots, _ = query.shape
    grouped = query.view(num_rows, form.num_kv_heads, form.group_size * num_slots, form.head_dim)
    is_seen = torch.arange(form.capacity, device=query.device) <= last_seen[:, None, :, None]  # [B, 1, S, C]
    mask = is_seen.repeat(1, 1, form.group_size, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        grouped, inputs["keys"], inputs["values"], attn_mask=mask
    )
    return {"attended": attended.view(query.shape)}
