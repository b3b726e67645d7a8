"""RowAttention in the plugins' microbenchmark: inputs, the bytes that have to move, and the same in plain torch.

Shape letters: `B` rows, `N` query heads, `K` KV heads, `S` queries of a row, `C` row capacity, `H` head dim, `P` pages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from dspark_trt_plugins.operation import ELEMENT_BYTES
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation

Tensors = dict[str, torch.Tensor]


def num_queries(form: RowAttentionForm) -> int:
    """Of a row of a timed call: a chunk where the form has some."""
    return form.num_chunk_slots or form.num_slots


def attention_floor_bytes(operation: RowAttentionOperation, num_rows: int, num_live: int) -> int:
    """Live keys and values once, queries and output once."""
    form = operation.form
    size = ELEMENT_BYTES[form.element_type]
    queries = 2 * num_rows * num_queries(form) * form.num_heads * form.head_dim * size
    return queries + 2 * num_rows * num_live * form.num_kv_heads * form.head_dim * size


def attention_inputs(operation: RowAttentionOperation, num_rows: int, num_live: int, device: str) -> Tensors:
    """Random inputs of rows of equal length, whose last query sees `num_live` positions; their pages lie anywhere."""
    torch.manual_seed(0)
    form, count = operation.form, num_queries(operation.form)
    num_pages = 1 + num_rows * form.table_width
    chunks = {"D": 1, "S": 1, "E": num_rows, "X": count} if form.num_chunk_slots else {"D": num_rows, "S": count}
    num_idle = 1 if form.num_chunk_slots else 0  # no row verifies beside chunks
    extents = {"T": num_rows * count, "P": num_pages, "B": num_rows + num_idle, **chunks}
    tensors = {
        tensor.name: torch.randn(tensor.shape_in(extents), dtype=getattr(torch, tensor.element_type), device=device)
        if tensor.element_type != "int64"
        else torch.zeros(tensor.shape_in(extents), dtype=torch.int64, device=device)
        for tensor in operation.inputs
    }
    tensors["first_tokens"][num_idle:] = count * torch.arange(num_rows, device=device)
    tensors["past_lengths"][num_idle:] = num_live - count
    tensors["query_lengths"][num_idle:] = count
    pages = 1 + torch.randperm(num_pages - 1, device=device)
    tensors["block_tables"][num_idle:] = pages.view(num_rows, form.table_width)
    return tensors


def torch_row_attention(form: RowAttentionForm, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """scaled_dot_product_attention over the whole capacity under a mask, with pages copied into rows.

    All rows that are not idle have equally many queries. Queries that share a key head stand as more slots of it, which
    is a view: so torch need not repeat keys and values, and any of its kernels that take a mask can be chosen.
    """
    is_busy = inputs["query_lengths"] > 0
    past, tables = inputs["past_lengths"][is_busy], inputs["block_tables"][is_busy]
    num_rows = len(past)
    query = inputs["query"].view(num_rows, -1, form.num_kv_heads, form.group_size, form.head_dim)
    num_slots = query.shape[1]
    grouped = query.permute(0, 2, 3, 1, 4).reshape(num_rows, form.num_kv_heads, -1, form.head_dim)
    keys, values = inputs["pages"][tables].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    slots = torch.arange(num_slots, device=past.device) if form.is_causal else torch.full_like(past, num_slots - 1)[:1]
    limits = past[:, None] + slots.expand(num_slots)
    is_seen = torch.arange(form.capacity, device=past.device) <= limits[:, None, :, None]  # [B, 1, S, C]
    mask = is_seen.repeat(1, 1, form.group_size, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    unfolded = attended.view(num_rows, form.num_kv_heads, form.group_size, num_slots, form.head_dim)
    return {"attended": unfolded.permute(0, 3, 1, 2, 4).reshape(inputs["query"].shape)}
