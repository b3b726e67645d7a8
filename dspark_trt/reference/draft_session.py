"""The draft graph of a block drafter in PyTorch; what `sessions` says holds here too.

Shape letters: `R` requests, `B` KV rows, `G` gamma, `V` vocabulary, `D` hidden.
"""

from __future__ import annotations

import numpy as np
import torch
from dspark_trt_plugins.markov_head.form import W2
from numpy.typing import NDArray

from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import BlockAttention, BlockDrafterSpec, TargetSpec
from dspark_trt.checkpoints.views import SelectedRows
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims
from dspark_trt.contract.drafter_form import LOWEST, columns_of
from dspark_trt.engines.device.session import Tensors
from dspark_trt.reference.attention import RowGroupAttention, sink_of
from dspark_trt.reference.model import ReferenceDecoder
from dspark_trt.reference.sequential import SequentialStage
from dspark_trt.reference.sessions import TorchSession, caches_of, decoder_layer, target_head
from dspark_trt.reference.weights import ReferenceWeights


class TorchDraftSession(TorchSession):
    """drafter_draft.onnx: one draft block for every request."""

    name = bindings.DRAFT_GRAPH

    def __init__(
        self,
        spec: BlockDrafterSpec,
        weights: ReferenceWeights,
        dims: DrafterDims,
        *,
        target_spec: TargetSpec,
        target_weights: ReferenceWeights,
        draft_ids: NDArray[np.int64] | None = None,
    ) -> None:
        """`draft_ids` as in DrafterCheckpoint. An embedding or head that the drafter does not own is the target's, the
        same tensor.

        Raises EnvironmentMissingError and EngineBuildError as SequentialStage does.
        """
        self._dims = dims
        self._spec = spec
        self._weights = weights
        self._decoder = ReferenceDecoder(spec.decoder, weights)
        self._columns: torch.Tensor | None = None
        if draft_ids is not None:
            columns = columns_of(draft_ids, spec.decoder.vocab_size)
            self._columns = torch.from_numpy(columns).to(weights.device)
            rows = SelectedRows(weights.store, {W2: columns % len(draft_ids)})
            weights = ReferenceWeights(rows, weights.device, weights.element_type)
        self._stage = SequentialStage(spec, weights)
        self._embedding = (weights if spec.has_own_embedding else target_weights)[EMBEDDING]
        self._head = weights[HEAD] if spec.has_own_head else target_weights[target_head(target_spec)]

    def forward(self, tensors: Tensors) -> None:
        decoder, dims = self._decoder, self._dims
        anchor_ids, past = tensors[bindings.ANCHOR_IDS], tensors[bindings.PAST_LENGTHS]
        row_requests, block_rows = tensors[bindings.ROW_REQUESTS], tensors[bindings.BLOCK_ROWS]
        length = dims.block_length
        places = torch.arange(length, device=past.device)
        row_past = past[row_requests]  # [B]
        tokens, query = row_requests[:, None] * length + places, tensors[bindings.ROW_QUERY_LENGTHS]
        group = RowGroupAttention(decoder.spec, tokens, row_past, query, dims.limits.max_seq_len)
        forms = {self._spec.attention_of(layer) for layer in range(decoder.spec.num_layers)}
        masks = {form: group.mask_to(*_seen(form, row_past, dims)) for form in forms}

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            key_cache, value_cache = caches_of(tensors, bindings.CONTEXT, layer)
            group.write(key_cache, keys)
            group.write(value_cache, values)
            mask, scale = masks[self._spec.attention_of(layer)], decoder.spec.score_scale_of(layer)
            sink = sink_of(self._spec, self._weights, layer)
            attended = group.attend(queries, key_cache, value_cache, mask, scale, sink)
            return attended.unflatten(0, (-1, length))[block_rows].flatten(0, 1)

        block = anchor_ids.new_full((len(anchor_ids), length), self._spec.mask_token_id)
        block[:, 0] = anchor_ids
        positions = (past[:, None] + places).flatten()
        x = decoder.embedded(self._embedding[block.flatten()])
        for layer in range(decoder.spec.num_layers):
            x = decoder_layer(decoder, layer, x, positions, attend)
        hidden = decoder.norm("norm", x.unflatten(0, (-1, length))[:, -dims.gamma :].flatten(0, 1))
        base_logits = decoder.cap(hidden @ self._head.T)
        if self._columns is not None:
            lowest = base_logits.new_full((len(base_logits), 1), LOWEST[dims.element_type])
            base_logits = torch.cat((base_logits, lowest), dim=1)[:, self._columns]
        self._stage.draft(base_logits.unflatten(0, (-1, dims.gamma)), hidden.unflatten(0, (-1, dims.gamma)), tensors)


def _seen(
    form: BlockAttention, row_past: torch.Tensor, dims: DrafterDims
) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """The last position that each query of a block sees, [B, n], the rows' capacity, and the first position."""
    positions = row_past[:, None] + torch.arange(dims.block_length, device=row_past.device)
    last_seen = positions if form.is_causal else positions[:, -1:].expand_as(positions)
    first_seen = None
    if form.window is not None:
        of_slot, of_anchor = positions - form.window + 1, (row_past - form.window)[:, None].expand_as(positions)
        first_seen = of_slot if form.window_from == "slot" else of_anchor
    return last_seen, dims.cache.capacity, first_seen
