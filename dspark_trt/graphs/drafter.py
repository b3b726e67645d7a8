"""The two drafter graphs: `ingest` brings taps into the context caches, `draft` makes one block per request.

Source: paper section 3.1, eq. 2-7. Shape letters: `R` requests, `G` gamma, `T` context tokens, `V` vocabulary, `D`
hidden, `M` tap layers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from dspark_trt_plugins.markov_head.form import W1, W2
from numpy.typing import NDArray

from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import DrafterCheckpoint, DrafterSpec, TargetCheckpoint, WeightStore
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import Attention, DrafterDims, drafter_dims, to_metadata
from dspark_trt.contract.drafter_form import (
    LOWEST,
    PLAIN_DRAFTER,
    DrafterForm,
    columns_of,
    proposed_ids,
    slot_counts,
)
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.graphs.attention import block_attention, context_writer, usable_form
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.decoder import DecoderParts, softcapped
from dspark_trt.graphs.heads import emit_markov_head
from dspark_trt.graphs.limits import check_limits
from dspark_trt.graphs.linears import Linears
from dspark_trt.graphs.numbers import Numbers, numbers_of
from dspark_trt.graphs.quantize import Quantisation, quantisation
from dspark_trt.graphs.target import head_weight
from dspark_trt.graphs.weights import PlacedWeights, SelectedRows, TensorSource, WeightFolder


def write_drafter_graphs(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    folder: Path,
    *,
    limits: EngineLimits,
    precision: Precision,
    attention: Attention = "drafter",
    form: DrafterForm = PLAIN_DRAFTER,
) -> None:
    """Write drafter_ingest.onnx and the draft graphs with their weights into `folder`, where target.onnx already is.

    Engines that can draft fewer slots than gamma, those of `drafter` attention, get a draft graph for each count.
    An embedding or head that the drafter does not own is the target's, in the target's file, unless it is needed in
    another form.
    Raises ExportError when a limit does not fit the drafter, target.onnx is of another precision, attention does not
    fit the precision, or a weight exceeds float16.
    """
    spec = drafter.spec
    check_limits(limits, spec.decoder, gamma=spec.gamma, what="drafter")
    is_whole = attention == "standard"  # an engine of a device has a column for every target id
    attention = usable_form(attention, spec.decoder, "drafter")
    numbers = numbers_of(precision, attention)
    own_ids = drafter.draft_ids
    ids = None if is_whole and form.draft_vocab is None else proposed_ids(form, own_ids)
    dims = drafter_dims(
        spec,
        limits=limits,
        attention=attention,
        element_type=numbers.model,
        num_draft_ids=None if ids is None else len(ids),
    )
    bits = quantisation(precision, form.precision)
    shared = PlacedWeights(folder / bindings.TARGET_GRAPH, "target.", target.weights)
    head_store, head_name = (drafter.weights, HEAD) if spec.has_own_head else (target.weights, head_weight(target.spec))
    store: WeightStore = drafter.weights
    if ids is not None:
        np.save(folder / bindings.DRAFT_VOCAB_FILE, ids)
        every_id = np.arange(spec.decoder.vocab_size, dtype=np.int64)
        rows = ids if own_ids is None else np.searchsorted(own_ids, ids)
        store = SelectedRows(drafter.weights, {W1: np.concatenate((ids, every_id)), W2: rows})
        head_store = SelectedRows(head_store, {head_name: rows if spec.has_own_head else ids})
    elif own_ids is not None:
        # the bias of an id without a column is any: its base logit is the lowest
        store = SelectedRows(drafter.weights, {W2: columns_of(own_ids, spec.decoder.vocab_size) % len(own_ids)})
    is_head_shared = not spec.has_own_head and ids is None and bits.drafter_head == bits.head
    with (
        WeightFolder(folder, "drafter", store) as weights,
        WeightFolder(folder, "drafter_head", head_store) as head_weights,
    ):
        ingest = GraphBuilder("drafter_ingest")
        _emit_ingest(ingest, spec, dims, weights, bits, numbers)
        ingest.save(folder / bindings.INGEST_GRAPH, to_metadata(dims))
        for num_slots in slot_counts(spec.gamma) if attention == "drafter" else (spec.gamma,):
            draft = GraphBuilder("drafter_draft")
            of_slots = replace(dims, gamma=num_slots)
            h = _emit_backbone(draft, spec, of_slots, weights, shared, bits, numbers)
            head = Linears(draft, shared if is_head_shared else head_weights, bits.drafter_head, dims.element_type)
            base_logits = head(h, head_name)  # [R * n, W]
            if (cap := spec.decoder.logit_softcap) is not None:
                base_logits = softcapped(draft, base_logits, cap, dims.element_type)
            if ids is None and own_ids is not None:
                base_logits = _on_every_id(draft, base_logits, own_ids, dims, numbers)
            emit_markov_head(
                draft,
                spec,
                weights,
                numbers,
                base_logits=draft.op("Reshape", base_logits, draft.vector(-1, num_slots, dims.vocab_size)),
                hidden=draft.op("Reshape", h, draft.vector(-1, num_slots, dims.hidden_size)),
                num_slots=num_slots,
                draft_vocab=ids,
                top_n=form.markov_top_n,
            )
            draft.save(folder / bindings.draft_graph(num_slots, spec.gamma), to_metadata(of_slots))


def _on_every_id(
    builder: GraphBuilder, logits: str, ids: NDArray[np.int64], dims: DrafterDims, numbers: Numbers
) -> str:
    """Logits [T, W] of `ids` as [T, V], with the lowest for every other id."""
    lowest = builder.constant(numbers.table(np.full((1, 1), LOWEST[numbers.model], np.float32)))
    rows = builder.op("Shape", logits, end=1)
    column = builder.op("Expand", lowest, builder.op("Concat", rows, builder.vector(1), axis=0))
    columns = builder.constant(columns_of(ids, dims.vocab_size))
    return builder.op("Gather", builder.op("Concat", logits, column, axis=1), columns, axis=1)


def _emit_ingest(
    builder: GraphBuilder,
    spec: DrafterSpec,
    dims: DrafterDims,
    weights: TensorSource,
    bits: Quantisation,
    numbers: Numbers,
) -> None:
    """K and V of every layer straight from the context feature; it passes through no input_layernorm."""
    for binding in bindings.ingest_inputs(dims):
        builder.input(binding)
    for binding in bindings.ingest_outputs(dims):
        builder.output(binding)
    parts = DecoderParts(
        builder,
        spec.decoder,
        weights,
        numbers,
        bits=bits.drafter_layers,
        positions=bindings.POSITIONS,
        num_positions=dims.limits.max_seq_len,
    )
    writer = context_writer(builder, spec.decoder, dims)
    fc = Linears(builder, weights, None, numbers.context)
    taps = numbers.cast(builder, bindings.TAPS, numbers.model, numbers.context)
    context = parts.norm(fc(taps, "fc.weight"), "hidden_norm", source=numbers.context)  # [T, D]
    for layer in range(spec.decoder.num_layers):
        with builder.scope(f"layers.{layer}"):
            writer.append(layer, parts.key(layer, context), parts.value(layer, context))


def _emit_backbone(
    builder: GraphBuilder,
    spec: DrafterSpec,
    dims: DrafterDims,
    weights: TensorSource,
    shared: TensorSource,
    bits: Quantisation,
    numbers: Numbers,
) -> str:
    """h of every slot after the final norm, [R * G, D]; of a mask-first block without the anchor's position."""
    for binding in bindings.draft_inputs(dims):
        builder.input(binding)
    for binding in bindings.draft_outputs(dims):
        builder.output(binding)
    past = builder.op("Unsqueeze", bindings.PAST_LENGTHS, builder.vector(1))  # [R, 1]
    places = builder.constant(np.arange(dims.block_length, dtype=np.int64))
    positions = builder.op("Reshape", builder.op("Add", past, places), builder.vector(-1))  # [R * length]
    parts = DecoderParts(
        builder,
        spec.decoder,
        weights,
        numbers,
        bits=bits.drafter_layers,
        positions=positions,
        num_positions=dims.limits.max_seq_len + dims.block_length,
    )
    attention = block_attention(builder, spec, dims, positions)
    embedding_source = weights if spec.has_own_embedding else shared
    embedding = builder.initializer(embedding_source.tensor(EMBEDDING, dims.element_type))
    anchors = builder.op("Unsqueeze", bindings.ANCHOR_IDS, builder.vector(1))  # [R, 1]
    # the anchor, then masks
    is_anchor = builder.constant(np.arange(dims.block_length) == 0)
    block = builder.op("Where", is_anchor, anchors, builder.scalar(spec.mask_token_id))  # [R, length]
    x = parts.embedded(builder.op("Gather", embedding, builder.op("Reshape", block, builder.vector(-1)), axis=0))
    for layer in range(spec.decoder.num_layers):
        x = parts.layer(layer, x, attention)
    if dims.is_mask_first:
        blocks = builder.op("Reshape", x, builder.vector(-1, dims.block_length, dims.hidden_size))
        slots = builder.op("Gather", blocks, builder.constant(np.arange(1, dims.block_length)), axis=1)
        x = builder.op("Reshape", slots, builder.vector(-1, dims.hidden_size))
    return parts.norm(x, "norm")
