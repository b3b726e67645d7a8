"""The drafter graphs of every family: `ingest` brings committed positions into the context, `draft` makes one block per
request. What they compute is the family's (`drafters`); sizes, head and draft vocabulary are decided here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import (
    BlockDrafterSpec,
    DrafterCheckpoint,
    DrafterSpec,
    Eagle3Spec,
    LanguageModelSpec,
    MedusaSpec,
    TargetCheckpoint,
    WeightStore,
)
from dspark_trt.checkpoints.views import OneTensor, SelectedRows
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import PORTABLE, Attention, device_attention, drafter_dims, host_attention, to_metadata
from dspark_trt.contract.draft_bindings import draft_inputs, draft_outputs
from dspark_trt.contract.drafter_form import PLAIN_DRAFTER, DrafterForm, proposed_ids, slot_counts
from dspark_trt.contract.model_bindings import model_inputs, model_outputs
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.graphs.attention import usable_form
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.drafters.block import BlockGraphs
from dspark_trt.graphs.drafters.eagle3 import Eagle3Graphs
from dspark_trt.graphs.drafters.language_model import LanguageModelGraphs
from dspark_trt.graphs.drafters.medusa import MedusaGraphs
from dspark_trt.graphs.drafters.parts import DrafterParts, FamilyGraphs
from dspark_trt.graphs.limits import check_limits
from dspark_trt.graphs.numbers import numbers_of
from dspark_trt.graphs.quantize import quantisation
from dspark_trt.graphs.target import head_weight
from dspark_trt.graphs.weights import PlacedWeights, WeightFolder


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
    is_whole = attention in PORTABLE  # an engine of a device has a column for every target id
    if attention == "paged":
        attention = device_attention(spec)
    attention = usable_form(attention, spec.decoder, "drafter")
    if attention == "drafter":
        attention = host_attention(spec)
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
    family = _family(spec)
    shared = PlacedWeights(folder / bindings.TARGET_GRAPH, "target.", target.weights)
    store: WeightStore = drafter.weights
    if chosen := family.chosen_rows(ids, own_ids):
        store = SelectedRows(store, chosen)
    own_store, own_name, is_own = _head(target, drafter)
    head_store: WeightStore = OneTensor(own_store, HEAD, own_name)
    if ids is not None:
        np.save(folder / bindings.DRAFT_VOCAB_FILE, ids)
        own_rows = ids if own_ids is None else np.searchsorted(own_ids, ids)
        head_store = SelectedRows(head_store, {HEAD: own_rows if is_own else ids})
    is_head_shared = not is_own and ids is None and bits.drafter_head == bits.head
    is_head_embedding = is_own and own_name == EMBEDDING and ids is None
    with (
        WeightFolder(folder, "drafter", store) as weights,
        WeightFolder(folder, "drafter_head", head_store) as head_weights,
    ):
        parts = DrafterParts(
            spec=spec,
            dims=dims,
            numbers=numbers,
            bits=bits,
            weights=weights,
            shared=shared,
            head_weights=shared if is_head_shared else weights if is_head_embedding else head_weights,
            head_name=own_name if is_head_shared or is_head_embedding else HEAD,
            head_bits=bits.drafter_head,
            ids=ids,
            own_ids=own_ids,
            top_n=form.markov_top_n,
        )
        if isinstance(family, LanguageModelGraphs):
            model = _graph("drafter_model", model_inputs(dims), model_outputs(dims))
            family.emit_model(model, parts)
            model.save(folder / bindings.MODEL_GRAPH, to_metadata(dims))
            return
        ingest = _graph("drafter_ingest", bindings.ingest_inputs(dims), bindings.ingest_outputs(dims))
        family.emit_ingest(ingest, parts)
        ingest.save(folder / bindings.INGEST_GRAPH, to_metadata(dims))
        for num_slots in (spec.gamma,) if attention in PORTABLE else slot_counts(spec.gamma):
            of_slots = replace(dims, gamma=num_slots)
            draft = _graph("drafter_draft", draft_inputs(of_slots), draft_outputs(of_slots))
            family.emit_draft(draft, replace(parts, dims=of_slots))
            draft.save(folder / bindings.draft_graph(num_slots, spec.gamma), to_metadata(of_slots))


def _head(target: TargetCheckpoint, drafter: DrafterCheckpoint) -> tuple[WeightStore, str, bool]:
    """Where the drafter's head is, its name there, and whether it is the drafter's own."""
    spec = drafter.spec
    if isinstance(spec, LanguageModelSpec) and spec.is_head_tied:
        return drafter.weights, EMBEDDING, True
    if spec.has_own_head:
        return drafter.weights, HEAD, True
    return target.weights, head_weight(target.spec), False


def _family(spec: DrafterSpec) -> FamilyGraphs | LanguageModelGraphs:
    match spec:
        case BlockDrafterSpec():
            return BlockGraphs(spec)
        case Eagle3Spec():
            return Eagle3Graphs(spec)
        case MedusaSpec():
            return MedusaGraphs(spec)
        case LanguageModelSpec():
            return LanguageModelGraphs(spec)


def _graph(name: str, inputs: Iterable[bindings.Binding], outputs: Iterable[bindings.Binding]) -> GraphBuilder:
    builder = GraphBuilder(name)
    for binding in inputs:
        builder.input(binding)
    for binding in outputs:
        builder.output(binding)
    return builder
