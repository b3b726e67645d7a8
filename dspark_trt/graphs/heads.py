"""Places the `dspark::MarkovHead` node, the sequential stage of the drafter, with its function body."""

from __future__ import annotations

import numpy as np
from dspark_trt_plugins.markov_head.form import W2, MarkovHeadForm
from dspark_trt_plugins.markov_head.function_body import markov_head_function, markov_head_node
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import BlockDrafterSpec
from dspark_trt.contract import bindings
from dspark_trt.contract.forms import markov_head_form
from dspark_trt.errors import ExportError
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.numbers import Numbers
from dspark_trt.graphs.weights import TensorSource


def emit_markov_head(
    builder: GraphBuilder,
    spec: BlockDrafterSpec,
    weights: TensorSource,
    numbers: Numbers,
    *,
    base_logits: str,
    hidden: str,
    num_slots: int,
    draft_vocab: NDArray[np.int64] | None = None,
    top_n: int = 0,
) -> None:
    """base_logits [R, n, W] and hidden [R, n, D], of the model's type, -> draft_ids, draft_logits, confidence_logits.

    The operation counts in ids of the draft vocabulary [W]; W1 begins with their rows, so that they are looked up as
    they are, and every target id's row stands behind them, for the anchor. Drafts are target ids again at the end.

    W2 is read once a slot. ONNX Runtime would pack it once for each of the G nodes that read it, G copies in memory; as
    an initializer that can be overridden it stays memory-mapped, which is faster for one request and slower for eight
    or more. In 16 bits it is a constant like any other: TensorRT would take it for an input.
    Raises ExportError when there are not more than `top_n` logits.
    """
    element_type = numbers.model
    vocab_size = spec.decoder.vocab_size if draft_vocab is None else len(draft_vocab)
    check_top_n(vocab_size, top_n)
    form = markov_head_form(spec, element_type, top_n, num_slots=num_slots, vocab_size=vocab_size)
    anchors = bindings.ANCHOR_IDS
    if draft_vocab is not None and form.has_markov_head:
        anchors = builder.op("Add", anchors, builder.scalar(vocab_size))
    inputs = [base_logits, hidden, anchors, bindings.TEMPERATURES, bindings.UNIFORMS]
    for name in form.weight_names:
        is_input = name == W2 and numbers.model == "float32"
        inputs.append(builder.initializer(weights.tensor(name, element_type), can_be_overridden=is_input))
    # the body of the nominal form has the Casts, which are valid on float32 too
    nominal = markov_head_form(spec, numbers.model, top_n, num_slots=num_slots, vocab_size=vocab_size)
    outputs = list(form.output_names)
    if draft_vocab is not None:
        outputs[0] = "draft_vocab_ids"
    builder.node(markov_head_node(form, inputs, outputs), markov_head_function(nominal))
    if draft_vocab is not None:
        builder.op("Gather", builder.constant(draft_vocab), outputs[0], axis=0, output=bindings.DRAFT_IDS)
    if not form.has_confidence_head:
        emit_margin(builder, vocab_size)


def emit_draw(
    builder: GraphBuilder,
    numbers: Numbers,
    *,
    logits: str,
    hidden: str,
    uniforms: str,
    vocab_size: int,
    top_n: int,
    anchors: str = bindings.ANCHOR_IDS,
) -> tuple[str, str]:
    """One slot that is drafted before the next one is computed, by a MarkovHead of one slot without a head.

    logits [R, W] and hidden [R, D] of the model's type, uniforms [R, 1] -> columns [R, 1] and the finite logits
    [R, 1, W] that they were drawn from, float32. Any `anchors` [R] will do: without a head they are not looked at.
    Raises ExportError when there are not more than `top_n` logits.
    """
    check_top_n(vocab_size, top_n)
    form = MarkovHeadForm(
        gamma=1,
        vocab_size=vocab_size,
        markov_rank=0,
        has_confidence_head=False,
        has_confidence_bias=False,
        is_confidence_with_markov=False,
        top_n=top_n,
        weight_type=numbers.model,
        logits_type=numbers.model,
    )
    slot = builder.vector(1)
    inputs = [
        builder.op("Unsqueeze", logits, slot),
        builder.op("Unsqueeze", hidden, slot),
        anchors,
        bindings.TEMPERATURES,
        uniforms,
    ]
    name = builder.fresh("MarkovHead")
    outputs = f"{name}:ids", f"{name}:logits"
    node = markov_head_node(form, inputs, outputs)
    node.name = name  # a slot's own
    builder.node(node, markov_head_function(form))
    return outputs


def emit_margin(builder: GraphBuilder, vocab_size: int) -> None:
    """Largest minus second largest draft logit of each slot, [R, n]:
    what a drafter without a head knows of its odds. Of a single logit, itself."""
    if vocab_size == 1:
        builder.op("Squeeze", bindings.DRAFT_LOGITS, builder.vector(2), output=bindings.CONFIDENCE_LOGITS)
        return
    values, _ = builder.multi_op("TopK", bindings.DRAFT_LOGITS, builder.vector(2), outputs=(None, None), axis=-1)
    largest = builder.op("Gather", values, builder.scalar(0), axis=2)
    builder.op(
        "Sub", largest, builder.op("Gather", values, builder.scalar(1), axis=2), output=bindings.CONFIDENCE_LOGITS
    )


def check_top_n(vocab_size: int, top_n: int) -> None:
    """Raises ExportError when there are not more than `top_n` logits."""
    if top_n >= vocab_size:
        raise ExportError(
            f"markov_top_n: expected less than the drafter's vocabulary of {vocab_size}, found {top_n}; "
            "leave --markov-top-n out to draw from all of it"
        )
