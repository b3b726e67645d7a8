"""The two drafter graphs: `ingest` brings taps into the context caches, `draft` makes one block per request.

Source: paper section 3.1, eq. 2-7. Shape letters: `R` requests, `G` gamma, `T` context tokens, `V` vocabulary, `D` hidden,
`M` tap layers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dspark_trt.building.recipe import Precision
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import DrafterCheckpoint, DrafterSpec, TargetCheckpoint
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import Attention, DrafterDims, drafter_dims, to_metadata
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.graphs.attention import block_attention, context_writer, usable_form
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.decoder import DecoderParts, Linears
from dspark_trt.graphs.heads import emit_markov_head
from dspark_trt.graphs.limits import check_limits
from dspark_trt.graphs.numbers import Numbers, numbers_of
from dspark_trt.graphs.quantize import LinearBits, linear_bits
from dspark_trt.graphs.target import head_weight
from dspark_trt.graphs.weights import PlacedWeights, TensorSource, WeightFolder


def write_drafter_graphs(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    folder: Path,
    *,
    limits: EngineLimits,
    precision: Precision,
    attention: Attention = "drafter",
    markov_top_n: int = 0,
) -> None:
    """Write drafter_ingest.onnx and drafter_draft.onnx with their weights into `folder`, where target.onnx already is.

    An embedding or head that the drafter does not own is the target's, in the target's file.
    `markov_top_n`: drafts of a slot come from its so many largest base logits; 0: from all.
    Raises ExportError when a limit does not fit the drafter, target.onnx is of another precision, attention does not fit the
    precision, or a weight exceeds float16.
    """
    spec = drafter.spec
    check_limits(limits, spec.decoder, gamma=spec.gamma, what="drafter")
    form = usable_form(attention, spec.decoder, "drafter")
    numbers = numbers_of(precision, form)
    dims = drafter_dims(spec, limits=limits, attention=form, element_type=numbers.model)
    metadata = to_metadata(dims)
    bits = linear_bits(precision)
    shared = PlacedWeights(folder / bindings.TARGET_GRAPH, "target.", target.weights)
    with WeightFolder(folder, "drafter", drafter.weights) as weights:
        ingest = GraphBuilder("drafter_ingest")
        _emit_ingest(ingest, spec, dims, weights, bits, numbers)
        ingest.save(folder / bindings.INGEST_GRAPH, metadata)
        draft = GraphBuilder("drafter_draft")
        h = _emit_backbone(draft, spec, dims, weights, shared, bits, numbers)
        head = Linears(draft, weights if spec.has_own_head else shared, bits.head, dims.element_type)
        base_logits = head(h, HEAD if spec.has_own_head else head_weight(target.spec))  # [R * G, V]
        emit_markov_head(
            draft,
            spec,
            weights,
            numbers,
            base_logits=draft.op("Reshape", base_logits, draft.vector(-1, dims.gamma, dims.vocab_size)),
            hidden=draft.op("Reshape", h, draft.vector(-1, dims.gamma, dims.hidden_size)),
            top_n=markov_top_n,
        )
        draft.save(folder / bindings.DRAFT_GRAPH, metadata)


def _emit_ingest(
    builder: GraphBuilder,
    spec: DrafterSpec,
    dims: DrafterDims,
    weights: TensorSource,
    bits: LinearBits,
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
    bits: LinearBits,
    numbers: Numbers,
) -> str:
    """h of every slot after the final norm, [R * G, D]."""
    for binding in bindings.draft_inputs(dims):
        builder.input(binding)
    for binding in bindings.draft_outputs(dims):
        builder.output(binding)
    past = builder.op("Unsqueeze", bindings.PAST_LENGTHS, builder.vector(1))  # [R, 1]
    slots = builder.constant(np.arange(dims.gamma, dtype=np.int64))
    positions = builder.op("Reshape", builder.op("Add", past, slots), builder.vector(-1))  # [R * G]
    parts = DecoderParts(
        builder,
        spec.decoder,
        weights,
        numbers,
        bits=bits.drafter_layers,
        positions=positions,
        num_positions=dims.limits.max_seq_len + dims.gamma,
    )
    attention = block_attention(builder, spec.decoder, dims, positions)
    embedding_source = weights if spec.has_own_embedding else shared
    embedding = builder.initializer(embedding_source.tensor(EMBEDDING, dims.element_type))
    anchors = builder.op("Unsqueeze", bindings.ANCHOR_IDS, builder.vector(1))  # [R, 1]
    # anchor, mask x (G - 1): the anchor takes the place of the first mask
    is_anchor = builder.constant(np.arange(dims.gamma) == 0)
    block = builder.op("Where", is_anchor, anchors, builder.scalar(spec.mask_token_id))  # [R, G]
    x = builder.op("Gather", embedding, builder.op("Reshape", block, builder.vector(-1)), axis=0)
    for layer in range(spec.decoder.num_layers):
        x = parts.layer(layer, x, attention)
    return parts.norm(x, "norm")
