"""Inputs and outputs of the one graph of a drafter that is a language model. Letters and types as in `bindings`.

| input | type, shape | meaning |
|---|---|---|
| token_ids, positions | int64 [T] | what is ingested, anchors, drafts, mask tokens |
| logit_rows | int64 [L] | packed indices that are drafted from |
| padded_indices | int64 [T] | as of the target |
| context.tokens, .past_lengths, .query_lengths | int64 | a row group |
| temperatures, uniforms | float32 [L], [L, 1] | |

| output | type, shape |
|---|---|
| draft_ids, draft_logits, confidence_logits | as of draft, each of the L rows a request of one slot |
| {cache}.out | the cache of that name, written in place |
"""

from __future__ import annotations

from dspark_trt.contract import bindings
from dspark_trt.contract.bindings import Binding, cache_outputs, caches, row_group
from dspark_trt.contract.dims import DrafterDims


def model_inputs(dims: DrafterDims) -> tuple[Binding, ...]:
    return (
        Binding(bindings.TOKEN_IDS, "int64", ("T",)),
        Binding(bindings.POSITIONS, "int64", ("T",)),
        Binding(bindings.LOGIT_ROWS, "int64", ("L",)),
        Binding(bindings.PADDED_INDICES, "int64", ("T",)),
        *row_group(bindings.CONTEXT),
        Binding(bindings.TEMPERATURES, "float32", ("L",)),
        Binding(bindings.UNIFORMS, "float32", ("L", 1)),
        *caches(bindings.CONTEXT, dims),
    )


def model_outputs(dims: DrafterDims) -> tuple[Binding, ...]:
    return (
        Binding(bindings.DRAFT_IDS, "int64", ("L", 1)),
        Binding(bindings.DRAFT_LOGITS, "float32", ("L", 1, dims.vocab_size)),
        Binding(bindings.CONFIDENCE_LOGITS, "float32", ("L", 1)),
        *cache_outputs(bindings.CONTEXT, dims),
    )
