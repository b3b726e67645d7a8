"""Both engines in plain PyTorch float32, straight from the checkpoints: the oracle of the tests, on CPU or CUDA.

Attention runs segment by segment over the row's own cache; nothing is padded, fused or rearranged.

Shape letters: `R` requests, `G` gamma, `T` packed tokens, `L` logit rows, `V` vocabulary, `D` hidden, `M` tap layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from dspark_trt.checkpoints.drafters.block import block_spec
from dspark_trt.checkpoints.spec import BlockDrafterSpec, DrafterCheckpoint, Eagle3Spec, TargetCheckpoint, TargetSpec
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch, TargetBatch, TargetOutput
from dspark_trt.errors import CapacityError
from dspark_trt.reference.attention import seen_by_block, seen_by_tokens, sink_of
from dspark_trt.reference.eagle3 import ReferenceEagle3Engine
from dspark_trt.reference.heads import ReferenceHeads
from dspark_trt.reference.model import ReferenceDecoder
from dspark_trt.reference.segments import ReferenceEngine, Segment
from dspark_trt.reference.weights import ReferenceWeights


def open_reference_engines(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    *,
    limits: EngineLimits,
    device: str = "cpu",
) -> tuple[ReferenceTargetEngine, ReferenceDraftEngine | ReferenceEagle3Engine]:
    """Target and drafter on one device; an embedding or head that the drafter does not own is shared with the target.

    Whatever the device, arrays go in and come out as numpy.
    """
    target_weights = ReferenceWeights(target.weights, device)
    target_engine = ReferenceTargetEngine(
        target.spec,
        target_weights,
        taps=drafter.spec.target_layer_ids,
        norm_last_tap=drafter.spec.is_last_tap_normed,
        limits=limits,
    )
    if isinstance(drafter.spec, Eagle3Spec):
        return target_engine, ReferenceEagle3Engine(drafter.spec, drafter, target, target_weights, limits=limits)
    return (
        target_engine,
        ReferenceDraftEngine(
            block_spec(drafter, "the reference of a drafter"),
            ReferenceWeights(drafter.weights, device),
            draft_ids=drafter.draft_ids,
            target_spec=target.spec,
            target_weights=target_weights,
            limits=limits,
        ),
    )


class ReferenceTargetEngine(ReferenceEngine):
    """TargetEngine of the protocol. `taps` are the drafter's target_layer_ids; without them, taps are [T, 0].

    With `norm_last_tap`, a tap of the last layer is taken behind the final norm, as Hugging Face's `hidden_states` are.
    """

    def __init__(
        self,
        spec: TargetSpec,
        weights: ReferenceWeights,
        *,
        taps: tuple[int, ...],
        norm_last_tap: bool,
        limits: EngineLimits,
    ) -> None:
        super().__init__(ReferenceDecoder(spec.decoder, weights), limits)
        self._taps = taps
        self._norm_last_tap = norm_last_tap
        self._embedding = weights["embed_tokens.weight"]
        self._head = weights["embed_tokens.weight" if spec.is_head_tied else "lm_head.weight"]
        self.vocab_size = spec.decoder.vocab_size

    def forward(self, batch: TargetBatch) -> TargetOutput:
        """Raises CapacityError when the batch exceeds the limits."""
        with torch.no_grad():
            segments = self._segments(batch)
            if segments[-1].end > self.limits.max_batch_tokens:
                raise CapacityError(
                    f"reference engine: expected at most {self.limits.max_batch_tokens} packed tokens, found "
                    f"{segments[-1].end}; raise max_batch_tokens"
                )
            last_layer = self._decoder.spec.num_layers - 1
            outputs = self._layer_outputs(self._tensor(batch.token_ids, torch.int64), segments)
            raw = {layer: output for layer, output in outputs if layer in (*self._taps, last_layer)}
            wanted = raw[last_layer][self._tensor(batch.logit_rows, torch.int64)]
            logits = self._decoder.cap(self._decoder.norm("norm", wanted) @ self._head.T)
            if self._norm_last_tap:
                raw[last_layer] = self._decoder.norm("norm", raw[last_layer])
            empty = logits.new_zeros(segments[-1].end, 0)
            taps = torch.cat([empty, *(raw[layer] for layer in self._taps)], dim=-1)
            return TargetOutput(self._output(logits), self._output(taps))

    def _layer_outputs(self, token_ids: torch.Tensor, segments: list[Segment]) -> Iterator[tuple[int, torch.Tensor]]:
        """(-1, embedding output), then (layer, its raw output), each [T, D]."""
        x = self._decoder.embedded(self._embedding[token_ids])
        yield -1, x
        positions = self._positions(segments)
        for layer in range(self._decoder.spec.num_layers):
            normed = self._decoder.norm(f"layers.{layer}.input_layernorm", x)
            queries = self._decoder.query(layer, normed, positions)
            keys, values = self._decoder.key_value(layer, normed, positions)
            attended = torch.empty_like(queries)
            for segment in segments:
                part = slice(segment.begin, segment.end)
                self._cache.write(layer, segment.row, segment.past, keys[part], values[part])
                row_keys, row_values = self._cache.read(layer, segment.row, segment.length)
                is_visible = seen_by_tokens(positions[part], self._decoder.spec.window_of(layer))
                attended[part] = self._decoder.attend(layer, queries[part], row_keys, row_values, is_visible)
            x = self._decoder.layer_output(layer, x, attended)
            yield layer, x


class ReferenceDraftEngine(ReferenceEngine):
    """DraftEngine of the protocol. Source: paper section 3.1."""

    def __init__(
        self,
        spec: BlockDrafterSpec,
        weights: ReferenceWeights,
        *,
        draft_ids: NDArray[np.int64] | None = None,
        target_spec: TargetSpec,
        target_weights: ReferenceWeights,
        limits: EngineLimits,
    ) -> None:
        super().__init__(ReferenceDecoder(spec.decoder, weights), limits)
        self._spec = spec
        self._weights = weights
        self._draft_ids = draft_ids
        self._heads = ReferenceHeads(spec, weights, draft_ids)
        target_head = "embed_tokens.weight" if target_spec.is_head_tied else "lm_head.weight"
        self._embedding = (weights if spec.has_own_embedding else target_weights)["embed_tokens.weight"]
        self._head = weights["lm_head.weight"] if spec.has_own_head else target_weights[target_head]
        self.gamma = spec.gamma

    def ingest(self, batch: IngestBatch) -> None:
        """K and V of every layer straight from the context feature. Raises CapacityError beyond the limits."""
        with torch.no_grad():
            segments = self._segments(batch)
            positions = self._positions(segments)
            context = self._weights.linear("fc", self._tensor(batch.taps, torch.float32))
            context = self._decoder.norm("hidden_norm", context)
            for layer in range(self._decoder.spec.num_layers):
                keys, values = self._decoder.key_value(layer, context, positions)
                for segment in segments:
                    part = slice(segment.begin, segment.end)
                    self._cache.write(layer, segment.row, segment.past, keys[part], values[part])

    @property
    def draft_vocab(self) -> NDArray[np.int64] | None:
        return self._draft_ids

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        """One block per request."""
        if ingest is not None:
            self.ingest(ingest)
        num_slots = batch.uniforms.shape[1]
        with torch.no_grad():
            anchor_ids = self._tensor(batch.anchor_ids, torch.int64)
            blocks = zip(anchor_ids, batch.rows.tolist(), batch.past_lengths.tolist(), strict=True)
            hidden = torch.stack([self._backbone(*block, num_slots) for block in blocks])
            draft_ids, draft_logits, confidence_logits = self._heads.draft(
                self._decoder.cap(hidden @ self._head.T),
                hidden,
                anchor_ids,
                self._tensor(batch.temperatures, torch.float32),
                self._tensor(batch.uniforms, torch.float32),
            )
            if confidence_logits is None:
                first, second = draft_logits.topk(2).values.unbind(-1)
                confidence_logits = first - second
            return DraftOutput(self._output(draft_ids), self._output(draft_logits), self._output(confidence_logits))

    def _backbone(self, anchor_id: torch.Tensor, row: int, past: int, num_slots: int) -> torch.Tensor:
        """h of every slot after the final norm, [n, D]."""
        num_masks = num_slots - 1 + self._spec.is_mask_first
        masks = anchor_id.new_full((num_masks,), self._spec.mask_token_id)
        x = self._decoder.embedded(self._embedding[torch.cat([anchor_id[None], masks])])
        positions = torch.arange(past, past + num_masks + 1, device=self._device)
        for layer in range(self._decoder.spec.num_layers):
            normed = self._decoder.norm(f"layers.{layer}.input_layernorm", x)
            keys, values = self._decoder.key_value(layer, normed, positions)
            context_keys, context_values = self._cache.read(layer, row, past)
            attended = self._decoder.attend(
                layer,
                self._decoder.query(layer, normed, positions),
                torch.cat([context_keys, keys]),
                torch.cat([context_values, values]),
                seen_by_block(self._spec.attention_of(layer), past, positions),
                sink_of(self._spec, self._weights, layer),
            )
            x = self._decoder.layer_output(layer, x, attended)
        return self._decoder.norm("norm", x[-num_slots:])
