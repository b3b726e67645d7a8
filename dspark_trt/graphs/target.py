"""The target graph: one forward pass over packed tokens, logits of the rows asked for, taps of all tokens.

Shape letters: `T` packed tokens, `L` logit rows, `V` vocabulary, `D` hidden, `M` tap layers.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import TargetCheckpoint, TargetSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import Attention, TargetDims, target_dims, to_metadata
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import ExportError
from dspark_trt.graphs.attention import causal_attention, usable_form
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.decoder import DecoderParts, softcapped
from dspark_trt.graphs.experts import Experts
from dspark_trt.graphs.limits import check_limits
from dspark_trt.graphs.linears import Linears
from dspark_trt.graphs.numbers import Numbers, numbers_of
from dspark_trt.graphs.quantize import quantisation
from dspark_trt.graphs.switched import SwitchedLinears
from dspark_trt.graphs.weights import TensorSource, WeightFolder

MIN_EXACT_QUERY = 2  # below it, ONNX Runtime's attention sums in another order
EMBEDDING_OUTPUT = -1  # the tap "layer" that stands for the embedding output


def write_target_graph(
    checkpoint: TargetCheckpoint,
    folder: Path,
    *,
    taps: tuple[int, ...],
    limits: EngineLimits,
    gamma: int,
    precision: Precision,
    attention: Attention,
    norm_last_tap: bool = False,
    wide_inputs: Collection[str] = (),
    is_mapped: bool = False,
) -> None:
    """Write target.onnx and its weights into `folder`.

    Args:
        taps: outputs of these decoder layers become the output `taps`, in this order; -1 is the embedding output.
            Without any there is no such output.
        norm_last_tap: whether a tap of the last layer is taken behind the final norm.
        wide_inputs: at int8, weights whose activations get sixteen bits, by canonical name.
        is_mapped: float32 weights stay in their file, memory-mapped: slower, and no second copy of them in memory.

    Raises ExportError when a tap or a limit does not fit the target, attention does not fit the precision, or a weight
    exceeds float16.
    """
    spec = checkpoint.spec
    check_limits(limits, spec.decoder, gamma=gamma, what="target")
    for layer in taps:
        if not EMBEDDING_OUTPUT <= layer < spec.decoder.num_layers:
            raise ExportError(
                f"tap layer {layer} is not in the target: expected -1 (embedding output) to "
                f"{spec.decoder.num_layers - 1}; use the drafter that was made for this target"
            )
    form = usable_form(attention, spec.decoder, "target")
    numbers = numbers_of(precision, form)
    dims = target_dims(
        spec,
        num_taps=len(taps),
        limits=limits,
        attention=form,
        element_type=numbers.model,
        min_query_length=MIN_EXACT_QUERY if precision == "int8" and form == "gqa" else 1,
    )
    builder = GraphBuilder("target")
    with WeightFolder(folder, "target", checkpoint.weights) as weights:
        bits = quantisation(precision)
        layers, head = (
            Linears(builder, weights, each, numbers.model, is_read_again=is_mapped, wide_inputs=wide_inputs)
            for each in (bits.target_layers, bits.head)
        )
        experts = None
        if (experts_spec := spec.decoder.experts) is not None:
            experts = Experts(builder, experts_spec, weights, numbers, bits=bits.target_layers, attention=attention)
        _emit(builder, spec, dims, taps, weights, layers, head, numbers, gamma, norm_last_tap, experts)
        builder.save(folder / bindings.TARGET_GRAPH, to_metadata(dims))


def write_switched_graph(
    checkpoint: TargetCheckpoint, folder: Path, *, limits: EngineLimits, gamma: int
) -> tuple[str, ...]:
    """Write target.onnx of int8 with a further input, bindings.LOW_STEPS; its Linear layers, in their order.

    Raises ExportError when a limit does not fit the target.
    """
    spec = checkpoint.spec
    check_limits(limits, spec.decoder, gamma=gamma, what="target")
    form = usable_form("gqa", spec.decoder, "target")
    least = MIN_EXACT_QUERY if form == "gqa" else 1
    dims = target_dims(spec, num_taps=0, limits=limits, attention=form, min_query_length=least)
    builder, numbers = GraphBuilder("target"), Numbers()
    with WeightFolder(folder, "target", checkpoint.weights) as weights:
        builder.input(bindings.low_steps())
        linears = SwitchedLinears(builder, weights)
        experts = None
        if (experts_spec := spec.decoder.experts) is not None:
            experts = Experts(builder, experts_spec, weights, numbers, bits="rows", attention=dims.attention)
        _emit(builder, spec, dims, (), weights, linears, linears, numbers, gamma, False, experts)
        builder.save(folder / bindings.TARGET_GRAPH, to_metadata(dims))
    return tuple(linears.weights)


def head_weight(spec: TargetSpec) -> str:
    """Canonical name of the output head's weight."""
    return EMBEDDING if spec.is_head_tied else HEAD


def _emit(
    builder: GraphBuilder,
    spec: TargetSpec,
    dims: TargetDims,
    taps: tuple[int, ...],
    weights: TensorSource,
    layers: Linears,
    head: Linears,
    numbers: Numbers,
    gamma: int,
    norm_last_tap: bool,
    experts: Experts | None,
) -> None:
    for binding in bindings.target_inputs(dims):
        builder.input(binding)
    for binding in bindings.target_outputs(dims):
        builder.output(binding)
    parts = DecoderParts(
        builder,
        spec.decoder,
        weights,
        numbers,
        layers,
        positions=bindings.POSITIONS,
        num_positions=dims.limits.max_seq_len,
        experts=experts,
    )
    attention = causal_attention(builder, spec.decoder, dims, gamma=gamma)
    embedding = builder.initializer(weights.tensor(EMBEDDING, dims.element_type))
    x = parts.embedded(builder.op("Gather", embedding, bindings.TOKEN_IDS, axis=0))
    outputs = {EMBEDDING_OUTPUT: x}
    last_layer = spec.decoder.num_layers - 1
    for layer in range(spec.decoder.num_layers):
        x = parts.layer(layer, x, attention)
        outputs[layer] = x
    if norm_last_tap and last_layer in taps:
        outputs[last_layer] = parts.norm(x, "norm")
    if taps:
        builder.op("Concat", *(outputs[layer] for layer in taps), axis=1, output=bindings.TAPS)
    wanted = builder.op("Gather", x, bindings.LOGIT_ROWS, axis=0)  # [L, D]
    cap, is_cast = spec.decoder.logit_softcap, numbers.model != "float32"
    is_last = not is_cast and cap is None
    logits = head(parts.norm(wanted, "norm"), head_weight(spec), output=bindings.LOGITS if is_last else None)
    is_last = cap is None
    logits = numbers.cast(builder, logits, numbers.model, "float32", output=bindings.LOGITS if is_last else None)
    if cap is not None:
        softcapped(builder, logits, cap, "float32", output=bindings.LOGITS)
