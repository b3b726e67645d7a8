"""Writes the drafter's graphs in the form that the recipe names, or in the one that measures best here."""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from dspark_trt.building.context import Context
from dspark_trt.building.drafter_choice import Asked, Evidence, candidates, choose, evidence_of
from dspark_trt.building.loops import UnpricedLoops
from dspark_trt.calibration.prompts import packaged_prompts
from dspark_trt.calibration.run import record_blocks
from dspark_trt.checkpoints.spec import DrafterCheckpoint
from dspark_trt.contract import bindings
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.protocol import DraftEngine, TargetBatch, TargetEngine
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.log import Progress
from dspark_trt.text import TextCodec

FORM_FILE = "drafter_form.json"
EVIDENCE_BUDGET_S = 15.0
_NUM_TIMINGS = 5


def write_drafter(context: Context, drafter: DrafterCheckpoint, folder: Path, progress: Progress) -> None:
    """The drafter's graphs beside target.onnx, and drafter_form.json, which says why they are in that form.

    Only engines of ONNX Runtime leave a choice, beside a target of float32 or int8: on a device all slots of the whole
    vocabulary are drafted.
    """
    recipe = context.recipe
    asked = Asked(recipe.draft_vocab, recipe.drafter_precision, recipe.markov_top_n)
    if context.is_on_device or context.precision == "int4":
        form = DrafterForm(markov_top_n=recipe.markov_top_n or 0)
        _write(context, drafter, folder, form)
        _write_report(folder, form, [], drafter.spec.num_draft_ids)
        return
    vocab_size = drafter.spec.num_draft_ids
    forms = candidates(asked, _no_evidence(drafter), vocab_size)
    found: list[dict[str, object]] = []
    form = forms[0]
    if len(forms) > 1:
        _write(context, drafter, folder, DrafterForm())
        evidence = _evidence(context, drafter, folder, lambda fraction: progress(0.5 * fraction))
        form, found = choose(
            candidates(asked, evidence, vocab_size),
            evidence,
            partial(_open_candidate, context, drafter, folder),
            vocab_size=vocab_size,
            progress=lambda fraction: progress(0.5 + 0.4 * fraction),
        )
        for path in _drafter_files(folder):
            path.unlink()
    _write(context, drafter, folder, form)
    _write_report(folder, form, found, vocab_size)


def _write(context: Context, drafter: DrafterCheckpoint, folder: Path, form: DrafterForm) -> None:
    write_drafter_graphs(
        context.target,
        drafter,
        folder,
        limits=context.limits,
        precision=context.precision,
        attention="paged" if context.is_on_device else "drafter",
        form=form,
    )


def _open_candidate(
    context: Context, drafter: DrafterCheckpoint, graphs: Path, form: DrafterForm, scratch: Path
) -> DraftEngine:
    """A drafter in `form` in the folder `scratch`, opened; the target's files are linked."""
    from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeSettings, open_draft_engine

    for path in graphs.iterdir():
        if path.name.startswith("target"):
            os.link(path, scratch / path.name)
    _write(context, drafter, scratch, form)
    return open_draft_engine(scratch, OnnxRuntimeSettings(num_threads=context.recipe.num_threads))


def _evidence(context: Context, drafter: DrafterCheckpoint, folder: Path, progress: Progress) -> Evidence:
    """Decode packaged prompts with the plain drafter, and time plain steps."""
    from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeSettings, open_engines

    target, plain = open_engines(folder, OnnxRuntimeSettings(num_threads=context.recipe.num_threads))
    codec = TextCodec.load(context.output / "checkpoints" / "tokenizer")

    make_loop = UnpricedLoops(target, plain, codec.decode, context.target.spec.eos_token_ids)
    recorder = record_blocks(
        make_loop,
        codec.encode_prompt,
        packaged_prompts(),
        budget_s=EVIDENCE_BUDGET_S,
        temperatures=(0.0,),
        max_tokens=48,
        max_seq_len=context.limits.max_seq_len,
        progress=progress,
    )
    plain_ms = {count: _plain_ms(target, count) for count in (1, 8) if count <= context.limits.max_requests}
    vocab_size = drafter.spec.decoder.vocab_size
    evidence = evidence_of(recorder, gamma=plain.gamma, vocab_size=vocab_size, plain_ms=plain_ms)
    if drafter.draft_ids is None:
        return evidence
    return replace(evidence, ranked_ids=evidence.ranked_ids[np.isin(evidence.ranked_ids, drafter.draft_ids)])


def _plain_ms(target: TargetEngine, num_requests: int) -> float:
    """Median milliseconds of a step of one token a request."""
    rows = np.arange(num_requests, dtype=np.int64)
    past = np.full(num_requests, min(64, target.limits.max_seq_len - 2), np.int64)
    batch = TargetBatch(rows, rows, past, np.ones(num_requests, np.int64), num_requests, rows)
    times = []
    for _ in range(_NUM_TIMINGS + 1):
        started = time.perf_counter()
        target.forward(batch)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[1:])


def _no_evidence(drafter: DrafterCheckpoint) -> Evidence:
    """Ids in their own order."""
    own_ids = drafter.draft_ids
    ranked = np.arange(drafter.spec.decoder.vocab_size, dtype=np.int64) if own_ids is None else own_ids
    return Evidence(ranked, np.empty(0, np.int64), 0.0, {})


def _drafter_files(folder: Path) -> list[Path]:
    names = (bindings.DRAFT_VOCAB_FILE, FORM_FILE)
    return [path for path in folder.iterdir() if path.name.startswith("drafter") or path.name in names]


def _write_report(folder: Path, form: DrafterForm, found: list[dict[str, object]], vocab_size: int) -> None:
    report = {
        "precision": form.precision,
        "num_draft_ids": vocab_size if form.draft_vocab is None else len(form.draft_vocab),
        "markov_top_n": form.markov_top_n,
        "measured": found,
    }
    (folder / FORM_FILE).write_text(json.dumps(report, indent=1) + "\n")
