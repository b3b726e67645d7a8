"""Calls of the four graphs as tensors by binding name:
row groups with gaps, padding everywhere, poison where nothing is valid.

What is padding may hold anything; `poison` chooses what, so that two calls that differ in it alone have to agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import CacheDims, DrafterDims, TargetDims

Tensors = dict[str, torch.Tensor]
Lengths = tuple[int, int]  # valid positions and tokens of a row; no tokens: an idle row


@dataclass(frozen=True)
class Poison:
    """What stands where nothing is valid."""

    cache_value: float
    token_id: int
    points_at: int  # packed token, real or padding, that padded queries point at


POISONS = (Poison(0.0, 0, 0), Poison(3e3, 11, 4))


def row_group(
    name: str, rows: Sequence[Lengths], first_token: int, num_queries: int, poison: Poison
) -> tuple[Tensors, list[int], list[int]]:
    """Index inputs of a group, its tokens' padded indices b * S + i and their positions."""
    tokens = torch.full((len(rows), num_queries), poison.points_at)
    padded_indices, positions = [], []
    for row, (past, query) in enumerate(rows):
        for index in range(query):
            tokens[row, index] = first_token + len(padded_indices)
            padded_indices.append(row * num_queries + index)
            positions.append(past + index)
    tensors = {
        bindings.group_tokens(name): tokens,
        bindings.group_past_lengths(name): torch.tensor([past if query else 0 for past, query in rows]),
        bindings.group_query_lengths(name): torch.tensor([query for _, query in rows]),
    }
    return tensors, padded_indices, positions


def cache_tensors(
    group: str, cache: CacheDims, rows: Sequence[int], element_type: torch.dtype, poison: Poison, seed: int
) -> Tensors:
    """Random keys and values up to each row's valid positions, and each output the same tensor as its input."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(cache.num_layers):
        for name in (bindings.key_cache(group, layer), bindings.value_cache(group, layer)):
            memory = torch.randn(len(rows), *cache.row_shape_of(layer), generator=random)
            for row, past in enumerate(rows):
                memory[row, :, past:] = poison.cache_value
            tensors[name] = tensors[bindings.cache_output(name)] = memory.to(element_type)
    return tensors


def target_call(
    dims: TargetDims,
    decode: Sequence[Lengths],
    prefill: Sequence[Lengths],
    *,
    num_tokens: int,
    num_queries: tuple[int, int],
    poison: Poison = POISONS[0],
    seed: int = 0,
) -> Tensors:
    """`num_tokens` and `num_queries` (of decode and of prefill) say how far everything is padded."""
    random = torch.Generator().manual_seed(seed)
    element_type = getattr(torch, dims.element_type)
    first, padded_indices, positions = row_group(bindings.DECODE, decode, 0, num_queries[0], poison)
    second, more_indices, more_positions = row_group(
        bindings.PREFILL, prefill, len(padded_indices), num_queries[1], poison
    )
    padded_indices += [len(decode) * num_queries[0] + index for index in more_indices]
    positions += more_positions
    num_real = len(padded_indices)
    padding = [0] * (num_tokens - num_real)
    token_ids = torch.full((num_tokens,), poison.token_id)
    token_ids[:num_real] = torch.randint(dims.vocab_size, (num_real,), generator=random)
    tensors = first | second
    for group, rows in ((bindings.DECODE, decode), (bindings.PREFILL, prefill)):
        tensors |= cache_tensors(group, dims.cache, [past for past, _ in rows], element_type, poison, seed + len(group))
    return tensors | {
        bindings.TOKEN_IDS: token_ids,
        bindings.POSITIONS: torch.tensor(positions + padding),
        bindings.PADDED_INDICES: torch.tensor(padded_indices + padding),
        bindings.LOGIT_ROWS: torch.arange(num_tokens),
        bindings.LOGITS: torch.full((num_tokens, dims.vocab_size), torch.nan),
        bindings.TAPS: torch.full((num_tokens, dims.tap_width), torch.nan, dtype=element_type),
    }


def ingest_call(
    dims: DrafterDims,
    rows: Sequence[Lengths],
    *,
    num_tokens: int,
    num_queries: int,
    poison: Poison = POISONS[0],
    scale: float = 1.0,
    seed: int = 0,
) -> Tensors:
    """Taps are `scale` large."""
    element_type = getattr(torch, dims.element_type)
    tensors, _, positions = row_group(bindings.CONTEXT, rows, 0, num_queries, poison)
    taps = torch.full((num_tokens, dims.tap_width), poison.cache_value)
    random = torch.Generator().manual_seed(seed)
    taps[: len(positions)] = scale * torch.randn(len(positions), dims.tap_width, generator=random)
    return (
        tensors
        | {
            bindings.TAPS: taps.to(element_type),
            bindings.POSITIONS: torch.tensor(positions + [0] * (num_tokens - len(positions))),
        }
        | cache_tensors(bindings.CONTEXT, dims.cache, [past for past, _ in rows], element_type, poison, seed + 1)
    )


def draft_call(
    dims: DrafterDims,
    past_lengths: Sequence[int],
    rows: Sequence[int],
    temperatures: Sequence[float],
    *,
    num_rows: int,
    poison: Poison = POISONS[0],
    seed: int = 0,
) -> Tensors:
    """`rows`: where each request lives within the range of `num_rows`; the others are idle."""
    random = torch.Generator().manual_seed(seed)
    num_requests = len(rows)
    row_requests = torch.full((num_rows,), poison.points_at % num_requests)
    row_query_lengths, row_past = torch.zeros(num_rows, dtype=torch.int64), [0] * num_rows
    for request, row in enumerate(rows):
        row_requests[row], row_query_lengths[row], row_past[row] = request, 1, past_lengths[request]
    confidence = {bindings.CONFIDENCE_LOGITS: torch.full((num_requests, dims.gamma), torch.nan)}
    element_type = getattr(torch, dims.element_type)
    return (
        {
            bindings.ANCHOR_IDS: torch.randint(dims.vocab_size, (num_requests,), generator=random),
            bindings.PAST_LENGTHS: torch.tensor(past_lengths),
            bindings.TEMPERATURES: torch.tensor(temperatures, dtype=torch.float32),
            bindings.UNIFORMS: torch.rand(num_requests, dims.gamma, generator=random),
            bindings.BLOCK_ROWS: torch.tensor(rows),
            bindings.ROW_REQUESTS: row_requests,
            bindings.ROW_QUERY_LENGTHS: row_query_lengths,
            bindings.DRAFT_IDS: torch.full((num_requests, dims.gamma), -1),
            bindings.DRAFT_LOGITS: torch.full((num_requests, dims.gamma, dims.vocab_size), torch.nan),
        }
        | confidence
        | cache_tensors(bindings.CONTEXT, dims.cache, row_past, element_type, poison, seed + 1)
    )


def copied(tensors: Tensors, device: str = "cpu", element_type: torch.dtype | None = None) -> Tensors:
    """The same call on memory of its own; a cache and its output stay one tensor. Floats as `element_type` but for
    float32 inputs and outputs."""
    copies: dict[int, torch.Tensor] = {}
    always_float32 = {bindings.LOGITS, bindings.DRAFT_LOGITS, bindings.CONFIDENCE_LOGITS}
    always_float32 |= {bindings.TEMPERATURES, bindings.UNIFORMS}
    for name, tensor in tensors.items():
        is_typed = tensor.is_floating_point() and name not in always_float32
        kind = element_type if is_typed and element_type else tensor.dtype
        copies.setdefault(id(tensor), tensor.clone().to(device=device, dtype=kind))
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def caches_of(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.endswith(".out")}


def run_graph(graph: Path, tensors: Tensors) -> None:
    """One call of a float32 graph under ONNX Runtime on these tensors' own memory."""
    import onnxruntime  # not on a GPU host

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()

    def bind(bind_one: Any, name: str) -> None:
        array = tensors[name].numpy()
        bind_one(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    for value in session.get_inputs():
        bind(binding.bind_input, value.name)
    for value in session.get_outputs():
        bind(binding.bind_output, value.name)
    session.run_with_iobinding(binding)
