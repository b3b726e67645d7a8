"""Places the `dspark::MarkovHead` node, the sequential stage of the drafter, with its function body."""

from __future__ import annotations

from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.markov_head.function_body import markov_head_function, markov_head_node

from dspark_trt import bindings
from dspark_trt.checkpoints.spec import DrafterSpec
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.weights import TensorSource

_READ_EVERY_SLOT = "markov_head.markov_w2.weight"


def emit_markov_head(
    builder: GraphBuilder, spec: DrafterSpec, weights: TensorSource, *, base_logits: str, hidden: str
) -> None:
    """base_logits [R, G, V] and hidden [R, G, D] -> the graph outputs draft_ids, draft_logits, confidence_logits.

    W2 is read once a slot. ONNX Runtime would pack it once for each of the G nodes that read it, G copies in memory; as an
    initializer that can be overridden it stays memory-mapped, which is faster for one request and slower for eight or more.
    """
    form = markov_head_form(spec)
    inputs = [base_logits, hidden, bindings.ANCHOR_IDS, bindings.TEMPERATURES, bindings.UNIFORMS]
    for name in form.weight_names:
        inputs.append(builder.initializer(weights.float32(name), can_be_overridden=name == _READ_EVERY_SLOT))
    builder.node(markov_head_node(form, inputs, form.output_names), markov_head_function(form))


def markov_head_form(spec: DrafterSpec) -> MarkovHeadForm:
    return MarkovHeadForm(
        gamma=spec.gamma,
        vocab_size=spec.decoder.vocab_size,
        hidden_size=spec.decoder.hidden_size,
        markov_rank=spec.markov_rank,
        head_type=spec.markov_head_type,
        has_confidence_head=spec.has_confidence_head,
        has_confidence_bias=spec.has_confidence_bias,
        is_confidence_with_markov=spec.is_confidence_with_markov,
    )
