"""A block of a language model's drafts: passes of drafter_model.onnx, put together as one call.

The first pass reads what is ingested, anchors and masks; each further draft is a pass over the draft before it. Nothing
goes over the host between them, so that the whole block is one CUDA graph.

Shape letters: `R` requests, `n` slots, `T` packed tokens, `L` drafts of a pass, `W` draft vocabulary; `B` KV rows and
`S` padded query length of the row group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.bindings import Binding
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.draft_bindings import drafts
from dspark_trt.contract.model_bindings import model_inputs
from dspark_trt.engines.device.buffers import Layout
from dspark_trt.engines.device.row_states import Call, ComposedSession
from dspark_trt.engines.device.session import DeviceSession, Tensors

_NEXT = "next."  # before the names of what the passes behind the first one read
_NOT_STAGED = (bindings.TOKEN_IDS, bindings.UNIFORMS)  # of these passes: drafts, and a slot of what is staged
_PAST, _QUERY = (_NEXT + name(bindings.CONTEXT) for name in (bindings.group_past_lengths, bindings.group_query_lengths))


def pass_layout(dims: DrafterDims, num_tokens: int, num_draws: int, rows: tuple[int, int]) -> Layout:
    """Where the index inputs of a pass stand; `rows` B, S."""
    return Layout(_index_inputs(dims), _extents(num_tokens, num_draws, rows))


def next_layout(dims: DrafterDims, num_requests: int, num_rows: int, num_passes: int, begin: int) -> Layout:
    """The same of the passes behind the first one, and their uniforms [num_passes, R, 1]."""
    staged = [each for each in _index_inputs(dims) if each.name not in _NOT_STAGED]
    tensors = [Binding(_NEXT + each.name, each.element_type, each.shape) for each in staged]
    uniforms = Binding(next_name(bindings.UNIFORMS), "float32", (num_passes, "L", 1))
    return Layout([*tensors, uniforms], _extents(num_requests, num_requests, (num_rows, 1)), begin=begin)


def next_name(name: str) -> str:
    """Of an input of the passes behind the first one."""
    return _NEXT + name


class ModelBlock(ComposedSession):
    """Takes the index inputs of both layouts, the caches, and draft_ids, draft_logits and confidence_logits [R, n, ..];
    draft_logits are contiguous."""

    def __init__(self, session: DeviceSession, dims: DrafterDims, device: torch.device) -> None:
        super().__init__(session)
        most = dims.limits.max_requests
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._uniforms = torch.zeros((most, 1), device=device)
        drawn = most * (1 if dims.mask_token_id is None else dims.gamma)
        self._drafts = {
            each.name: torch.zeros((drawn, *each.shape[1:]), dtype=getattr(torch, each.element_type), device=device)
            for each in drafts(dims, 1)
            if each.name != bindings.DRAFT_LOGITS
        }
        # with masks a block's own are written where they stay, and these are those of a pass that drafts nothing
        self._logits = torch.zeros((most if dims.is_in_turn else 1, 1, dims.vocab_size), device=device)

    def outputs(self, num_draws: int) -> Tensors:
        """Of a pass that makes so many drafts, at most one a request."""
        small = {name: tensor[:num_draws] for name, tensor in self._drafts.items()}
        return small | {bindings.DRAFT_LOGITS: self._logits[:num_draws]}

    def _composed(self, tensors: Tensors, call: Callable[[Tensors], Call]) -> Call:
        caches = {name: tensor for name, tensor in tensors.items() if bindings.is_cache(name)}
        block = {name: tensors[name] for name in (bindings.DRAFT_IDS, bindings.CONFIDENCE_LOGITS)}
        logits = tensors[bindings.DRAFT_LOGITS]
        index = {name: tensor for name, tensor in tensors.items() if name not in caches and name not in block}
        staged = {name.removeprefix(_NEXT): tensor for name, tensor in index.items() if name.startswith(_NEXT)}
        first_pass = {name: tensor for name, tensor in index.items() if not name.startswith(_NEXT)}
        num_draws, (num_requests, num_slots, _) = len(tensors[bindings.LOGIT_ROWS]), logits.shape
        found = {name: tensor[:num_draws] for name, tensor in self._drafts.items()}
        if num_draws == num_requests * num_slots:
            direct = logits.view(num_draws, 1, -1)
            only = call(first_pass | caches | found | {bindings.DRAFT_LOGITS: direct})

            def draft() -> None:
                only()
                for name, tensor in block.items():
                    tensor.copy_(found[name].view(num_requests, num_slots))

            return draft
        slot_logits = self._logits[:num_requests]
        tokens, uniforms = self._tokens[:num_requests], self._uniforms[:num_requests]
        outputs = found | {bindings.DRAFT_LOGITS: slot_logits}
        first = call(first_pass | caches | outputs)
        following = call(staged | caches | outputs | {bindings.TOKEN_IDS: tokens, bindings.UNIFORMS: uniforms})
        positions, past, query = tensors[next_name(bindings.POSITIONS)], tensors[_PAST], tensors[_QUERY]

        def draft_in_turn() -> None:
            first()
            for slot in range(num_slots):
                if slot:
                    tokens.copy_(found[bindings.DRAFT_IDS][:, 0])
                    uniforms.copy_(staged[bindings.UNIFORMS][slot - 1])
                    following()
                    positions.add_(1)
                    past.add_(query)
                for name, tensor in block.items():
                    tensor[:, slot : slot + 1].copy_(found[name])
                logits[:, slot : slot + 1].copy_(slot_logits)

        return draft_in_turn


def _index_inputs(dims: DrafterDims) -> list[Binding]:
    return [each for each in model_inputs(dims) if not bindings.is_cache(each.name)]


def _extents(num_tokens: int, num_draws: int, rows: tuple[int, int]) -> dict[str, int]:
    num_rows, num_queries = rows
    group = {f"B_{bindings.CONTEXT}": num_rows, f"S_{bindings.CONTEXT}": num_queries}
    return {"T": num_tokens, "L": num_draws} | group
