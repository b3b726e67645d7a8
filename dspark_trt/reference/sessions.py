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

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import BlockDrafterSpec, TargetSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.session import Tensors
from dspark_trt.reference.attention import RowGroupAttention, causal_limits
from dspark_trt.reference.model import ReferenceDecoder
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
                key_cache, value_cache = caches_of(tensors, name, layer)
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
            for cache, packed in zip(caches_of(tensors, bindings.CONTEXT, layer), (keys, values), strict=True):
                group.write(cache, packed)


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


def caches_of(tensors: Tensors, group: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer."""
    return tensors[bindings.key_cache(group, layer)], tensors[bindings.value_cache(group, layer)]
