"""The graphs of `bindings` in PyTorch, straight from the checkpoints, on any device:
what a compiled engine does, without a compiler.

They take the very tensors that a TensorRT engine of a `standard` graph takes, in the same element types, and write the
very outputs, so that all of the device runtime runs on a host with nothing but torch (and, on a GPU, triton). Norms,
rotation, logits and the sequential stage are float32, as in the graphs; in float16 the drafter's `fc` and `hidden_norm`
too.

No call waits for the device, reads a value on the host or makes a shape of one.

Shape letters: `R` requests, `G` gamma, `T` packed tokens, `L` logit rows, `V` vocabulary, `D` hidden, `M` tap layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from dspark_trt_plugins.markov_head.form import W2
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import BlockAttention, BlockDrafterSpec, TargetSpec
from dspark_trt.checkpoints.views import SelectedRows
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.contract.drafter_form import LOWEST, columns_of
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.session import Tensors
from dspark_trt.reference.attention import RowGroupAttention, causal_limits, sink_of
from dspark_trt.reference.model import ReferenceDecoder
from dspark_trt.reference.sequential import SequentialStage
from dspark_trt.reference.weights import ReferenceWeights

# What cuDNN would choose for Hopper compiles a plan for every new shape.
_ATTENTION_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class TorchSession(ABC):
    """DeviceSession of one graph."""

    name: str

    @abstractmethod
    def forward(self, tensors: Tensors) -> None:
        """Enqueue the graph's operators."""

    def run(self, tensors: Tensors) -> None:
        """Raises EngineBuildError when PyTorch or CUDA fails."""
        with torch_errors(self.name), torch.no_grad(), sdpa_kernel(_ATTENTION_BACKENDS):
            self.forward(tensors)

    def bind(self, tensors: Tensors) -> Callable[[], None]:
        return lambda: self.run(tensors)


class TorchTargetSession(TorchSession):
    """target.onnx. `taps` are the drafter's target_layer_ids; without them there is no output `taps`.

    With `norm_last_tap`, a tap of the last layer is taken behind the final norm.
    """

    name = bindings.TARGET_GRAPH

    def __init__(
        self,
        spec: TargetSpec,
        weights: ReferenceWeights,
        dims: TargetDims,
        taps: tuple[int, ...],
        *,
        norm_last_tap: bool = False,
    ) -> None:
        self._dims = dims
        self._taps = taps
        self._norm_last_tap = norm_last_tap
        self._decoder = ReferenceDecoder(spec.decoder, weights)
        self._embedding = weights[EMBEDDING]
        self._head = weights[target_head(spec)]

    def forward(self, tensors: Tensors) -> None:
        decoder, dims = self._decoder, self._dims
        groups, masks = {}, {}
        layers = range(decoder.spec.num_layers)
        forms = [(decoder.spec.window_of(layer), decoder.spec.shape_of(layer).num_kv_heads) for layer in layers]
        for name in bindings.TARGET_GROUPS:
            tokens, past = tensors[bindings.group_tokens(name)], tensors[bindings.group_past_lengths(name)]
            query = tensors[bindings.group_query_lengths(name)]
            groups[name] = RowGroupAttention(decoder.spec, tokens, past, query, dims.limits.max_seq_len)
            last_seen = causal_limits(past, tokens)
            masks[name] = {
                (window, heads): groups[name].mask_to(
                    last_seen, dims.cache.capacity, None if window is None else last_seen - window + 1, heads
                )
                for window, heads in set(forms)
            }

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            padded = []
            for name, group in groups.items():
                key_cache, value_cache = _caches(tensors, name, layer)
                group.write(key_cache, keys)
                group.write(value_cache, values)
                scale = decoder.spec.score_scale_of(layer)
                padded.append(group.attend(queries, key_cache, value_cache, masks[name][forms[layer]], scale))
            return torch.cat(padded)[tensors[bindings.PADDED_INDICES]]

        x = decoder.embedded(self._embedding[tensors[bindings.TOKEN_IDS]])
        raw = {-1: x}
        for layer in layers:
            x = raw[layer] = decoder_layer(decoder, layer, x, tensors[bindings.POSITIONS], attend)
        if self._norm_last_tap:
            raw[decoder.spec.num_layers - 1] = decoder.norm("norm", x)
        if self._taps:
            torch.cat([raw[layer] for layer in self._taps], dim=-1, out=tensors[bindings.TAPS])
        wanted = decoder.norm("norm", x[tensors[bindings.LOGIT_ROWS]])
        tensors[bindings.LOGITS].copy_(wanted @ self._head.T)
        decoder.cap(tensors[bindings.LOGITS])


class TorchIngestSession(TorchSession):
    """drafter_ingest.onnx: taps enter the context caches."""

    name = bindings.INGEST_GRAPH

    def __init__(self, spec: BlockDrafterSpec, weights: ReferenceWeights, dims: DrafterDims) -> None:
        self._dims = dims
        self._weights = weights
        self._decoder = ReferenceDecoder(spec.decoder, weights)
        self._element_type = weights.element_type
        self._context_type = context_type(self._element_type)

    def forward(self, tensors: Tensors) -> None:
        decoder = self._decoder
        group = RowGroupAttention(
            decoder.spec,
            tensors[bindings.group_tokens(bindings.CONTEXT)],
            tensors[bindings.group_past_lengths(bindings.CONTEXT)],
            tensors[bindings.group_query_lengths(bindings.CONTEXT)],
            self._dims.limits.max_seq_len,
        )
        context = self._weights.linear("fc", tensors[bindings.TAPS].to(self._context_type))
        context = decoder.norm("hidden_norm", context).to(self._element_type)
        for layer in range(decoder.spec.num_layers):
            keys, values = decoder.key_value(layer, context, tensors[bindings.POSITIONS])
            for cache, packed in zip(_caches(tensors, bindings.CONTEXT, layer), (keys, values), strict=True):
                group.write(cache, packed)


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
            key_cache, value_cache = _caches(tensors, bindings.CONTEXT, layer)
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


def decoder_layer(
    decoder: ReferenceDecoder,
    layer: int,
    x: torch.Tensor,
    positions: torch.Tensor,
    attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The raw output of one layer, [T, D] -> [T, D]."""
    normed = decoder.norm(f"layers.{layer}.input_layernorm", x)
    keys, values = decoder.key_value(layer, normed, positions)
    attended = attend(layer, decoder.query(layer, normed, positions), keys, values)
    return decoder.layer_output(layer, x, attended)


def target_head(spec: TargetSpec) -> str:
    """Canonical name of the output head's weight."""
    return EMBEDDING if spec.is_head_tied else HEAD


def context_type(element_type: torch.dtype) -> torch.dtype:
    """Of the drafter's `fc`: taps have massive activations that it would carry beyond float16."""
    return torch.float32 if element_type == torch.float16 else element_type


def _caches(tensors: Tensors, group: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tensors[bindings.key_cache(group, layer)], tensors[bindings.value_cache(group, layer)]
