"""The target graph: one forward pass over packed tokens, logits of the rows asked for, taps of all tokens.

Shape letters: `T` packed tokens, `L` logit rows, `V` vocabulary, `D` hidden, `M` tap layers.
"""

from __future__ import annotations

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
from dspark_trt.graphs.quantize import Quantisation, quantisation
from dspark_trt.graphs.weights import TensorSource, WeightFolder

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
) -> None:
    """Write target.onnx and its weights into `folder`.

    Args:
        taps: outputs of these decoder layers become the output `taps`, in this order; -1 is the embedding output.
            Without any there is no such output.
        norm_last_tap: whether a tap of the last layer is taken behind the final norm.

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
    dims = target_dims(spec, num_taps=len(taps), limits=limits, attention=form, element_type=numbers.model)
    builder = GraphBuilder("target")
    with WeightFolder(folder, "target", checkpoint.weights) as weights:
        bits = quantisation(precision)
        experts = None
        if (experts_spec := spec.decoder.experts) is not None:
            experts = Experts(builder, experts_spec, weights, numbers, bits=bits.target_layers, attention=attention)
        _emit(builder, spec, dims, taps, weights, bits, numbers, gamma, norm_last_tap, experts)
        builder.save(folder / bindings.TARGET_GRAPH, to_metadata(dims))


def head_weight(spec: TargetSpec) -> str:
    """Canonical name of the output head's weight."""
    return EMBEDDING if spec.is_head_tied else HEAD


def _emit(
    builder: GraphBuilder,
    spec: TargetSpec,
    dims: TargetDims,
    taps: tuple[int, ...],
    weights: TensorSource,
    bits: Quantisation,
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
        bits=bits.target_layers,
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
    head = Linears(builder, weights, bits.head, dims.element_type)
    cap, is_cast = spec.decoder.logit_softcap, numbers.model != "float32"
    is_last = not is_cast and cap is None
    logits = head(parts.norm(wanted, "norm"), head_weight(spec), output=bindings.LOGITS if is_last else None)
    is_last = cap is None
    logits = numbers.cast(builder, logits, numbers.model, "float32", output=bindings.LOGITS if is_last else None)
    if cap is not None:
        softcapped(builder, logits, cap, "float32", output=bindings.LOGITS)
