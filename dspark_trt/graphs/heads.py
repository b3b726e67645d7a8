"""Places the `dspark::MarkovHead` node, the sequential stage of the drafter, with its function body."""

from __future__ import annotations

from dspark_trt_plugins.markov_head.form import W2, MarkovHeadForm
from dspark_trt_plugins.markov_head.function_body import markov_head_function, markov_head_node

from dspark_trt.checkpoints.spec import DrafterSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import FloatType
from dspark_trt.errors import ExportError
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.numbers import Numbers
from dspark_trt.graphs.weights import TensorSource


def emit_markov_head(
    builder: GraphBuilder,
    spec: DrafterSpec,
    weights: TensorSource,
    numbers: Numbers,
    *,
    base_logits: str,
    hidden: str,
    top_n: int = 0,
) -> None:
    """base_logits [R, G, V] and hidden [R, G, D], of the model's type, -> draft_ids, draft_logits, confidence_logits.

    W2 is read once a slot. ONNX Runtime would pack it once for each of the G nodes that read it, G copies in memory; as an
    initializer that can be overridden it stays memory-mapped, which is faster for one request and slower for eight or more.
    In 16 bits it is a constant like any other: TensorRT would take it for an input.
    Raises ExportError when there are not more than `top_n` logits.
    """
    check_top_n(spec, top_n)
    element_type = numbers.model
    form = markov_head_form(spec, element_type, top_n)
    inputs = [base_logits, hidden, bindings.ANCHOR_IDS, bindings.TEMPERATURES, bindings.UNIFORMS]
    for name in form.weight_names:
        is_input = name == W2 and numbers.model == "float32"
        inputs.append(builder.initializer(weights.tensor(name, element_type), can_be_overridden=is_input))
    # the body of the nominal form has the Casts, which are valid on float32 too
    body = markov_head_function(markov_head_form(spec, numbers.model, top_n))
    builder.node(markov_head_node(form, inputs, form.output_names), body)


def check_top_n(spec: DrafterSpec, top_n: int) -> None:
    """Raises ExportError when there are not more than `top_n` logits."""
    if top_n >= spec.decoder.vocab_size:
        raise ExportError(
            f"markov_top_n: expected less than the drafter's vocabulary of {spec.decoder.vocab_size}, found {top_n}; leave "
            "--markov-top-n out to draw from all of it"
        )


def markov_head_form(spec: DrafterSpec, element_type: FloatType, top_n: int = 0) -> MarkovHeadForm:
    """The form with weights, hidden states and base logits of one type; `top_n` 0 draws from the whole vocabulary."""
    return MarkovHeadForm(
        gamma=spec.gamma,
        vocab_size=spec.decoder.vocab_size,
        hidden_size=spec.decoder.hidden_size,
        markov_rank=spec.markov_rank,
        head_type=spec.markov_head_type,
        has_confidence_head=spec.has_confidence_head,
        has_confidence_bias=spec.has_confidence_bias,
        is_confidence_with_markov=spec.is_confidence_with_markov,
        top_n=top_n,
        weight_type=element_type,
        logits_type=element_type,
    )
