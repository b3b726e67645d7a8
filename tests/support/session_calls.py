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
from dspark_trt.contract.cache_dims import CacheDims
from dspark_trt.contract.dims import DrafterDims, TargetDims

Tensors = dict[str, torch.Tensor]
Lengths = tuple[int, int]  # valid positions and tokens of a row; no tokens: an idle row


@dataclass(frozen=True)
class Poison:
    """What stands where nothing is valid."""

    cache_value: float
    token_id: int
    points_at: int  # packed token, real or padding, that padded queries point at


POISONS = (Poison(0.0, 0, 0), Poison(3e3, 11, 4))


class Pool:
    """Pages of some rows, in no order, among pages of nobody."""

    def __init__(self, cache: CacheDims, lengths: Sequence[int], poison: Poison, seed: int) -> None:
        """`lengths`: valid positions of each row; it has pages for as many as a row may have."""
        self.cache = cache
        self._lengths = lengths
        self._poison = poison
        self._random = torch.Generator().manual_seed(seed)
        num_pages = len(lengths) * cache.table_width + 3
        pages = 1 + torch.randperm(num_pages - 1, generator=self._random)
        self.tables = pages[: len(lengths) * cache.table_width].reshape(len(lengths), cache.table_width)
        self._num_pages = num_pages

    def tensors(self, element_type: torch.dtype) -> Tensors:
        """Random keys and values of valid positions, and each output the same tensor as its input."""
        tensors = {}
        for layer in range(self.cache.num_layers):
            _, num_kv_heads, page_positions, head_dim = self.cache.page_shape_of(layer)
            shape = (self._num_pages, *self.cache.page_shape_of(layer))
            pool = torch.full(shape, self._poison.cache_value)
            for table, length in zip(self.tables, self._lengths, strict=True):
                for position in range(length):
                    numbers = torch.randn(2, num_kv_heads, head_dim, generator=self._random)
                    pool[int(table[position // page_positions]), :, :, position % page_positions] = numbers
            name = bindings.page_cache(layer)
            tensors[name] = tensors[bindings.cache_output(name)] = pool.to(element_type)
        return tensors


def held(pool: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """What a row holds, [2, K, length, H]."""
    return pool[table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]


def row_group(
    name: str, rows: Sequence[Lengths], first_token: int, num_queries: int, poison: Poison, tables: torch.Tensor
) -> tuple[Tensors, list[int]]:
    """Index inputs of a group, and the positions of its tokens."""
    tokens = torch.full((len(rows), num_queries), poison.points_at)
    positions = []
    for row, (past, query) in enumerate(rows):
        for index in range(query):
            tokens[row, index] = first_token + len(positions)
            positions.append(past + index)
    tensors = {
        bindings.group_tokens(name): tokens,
        bindings.group_past_lengths(name): torch.tensor([past if query else 0 for past, query in rows]),
        bindings.group_query_lengths(name): torch.tensor([query for _, query in rows]),
        bindings.group_block_tables(name): tables.clone(),
    }
    return tensors, positions


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
    pool = Pool(dims.cache, [past for past, _ in (*decode, *prefill)], poison, seed + 1)
    first, positions = row_group(bindings.DECODE, decode, 0, num_queries[0], poison, pool.tables[: len(decode)])
    second, more_positions = row_group(
        bindings.PREFILL, prefill, len(positions), num_queries[1], poison, pool.tables[len(decode) :]
    )
    positions += more_positions
    num_real = len(positions)
    padding = [0] * (num_tokens - num_real)
    token_ids = torch.full((num_tokens,), poison.token_id)
    token_ids[:num_real] = torch.randint(dims.vocab_size, (num_real,), generator=random)
    tensors = first | second | pool.tensors(element_type)
    return tensors | {
        bindings.TOKEN_IDS: token_ids,
        bindings.POSITIONS: torch.tensor(positions + padding),
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
    pool = Pool(dims.cache, [past for past, _ in rows], poison, seed + 1)
    tensors, positions = row_group(bindings.CONTEXT, rows, 0, num_queries, poison, pool.tables)
    tensors = {each.name: tensors[each.name] for each in bindings.ingest_inputs(dims) if each.name in tensors}
    taps = torch.full((num_tokens, dims.tap_width), poison.cache_value)
    random = torch.Generator().manual_seed(seed)
    taps[: len(positions)] = scale * torch.randn(len(positions), dims.tap_width, generator=random)
    return (
        tensors
        | {
            bindings.TAPS: taps.to(element_type),
            bindings.POSITIONS: torch.tensor(positions + [0] * (num_tokens - len(positions))),
        }
        | pool.tensors(element_type)
    )


def draft_call(
    dims: DrafterDims,
    past_lengths: Sequence[int],
    temperatures: Sequence[float],
    *,
    poison: Poison = POISONS[0],
    seed: int = 0,
) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    num_requests = len(past_lengths)
    pool = Pool(dims.cache, past_lengths, poison, seed + 1)
    confidence = {bindings.CONFIDENCE_LOGITS: torch.full((num_requests, dims.gamma), torch.nan)}
    element_type = getattr(torch, dims.element_type)
    return (
        {
            bindings.ANCHOR_IDS: torch.randint(dims.vocab_size, (num_requests,), generator=random),
            bindings.PAST_LENGTHS: torch.tensor(past_lengths),
            bindings.TEMPERATURES: torch.tensor(temperatures, dtype=torch.float32),
            bindings.UNIFORMS: torch.rand(num_requests, dims.gamma, generator=random),
            bindings.group_block_tables(bindings.CONTEXT): pool.tables.clone(),
            bindings.DRAFT_IDS: torch.full((num_requests, dims.gamma), -1),
            bindings.DRAFT_LOGITS: torch.full((num_requests, dims.gamma, dims.vocab_size), torch.nan),
        }
        | confidence
        | pool.tensors(element_type)
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
