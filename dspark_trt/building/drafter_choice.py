"""Chooses the drafter's form at build: the one whose blocks, as timed here, bring the most expected tokens a
millisecond.

It changes what is proposed, never what is accepted. Source: paper section 3.2.2 (expected throughput); FR-Spec (arXiv
2502.14856) for draft vocabularies.

What a smaller vocabulary loses is counted: the share of accepted drafts, of prompts decoded with the whole one, whose
id it lacks. Ids are ranked by how often the target itself wrote them, then by id, since merge order is a good prior.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.calibration.record import Recorder
from dspark_trt.contract.drafter_form import DrafterForm, DrafterPrecision
from dspark_trt.contract.protocol import DraftBatch, DraftEngine
from dspark_trt.graphs.heads import check_top_n
from dspark_trt.log import Progress, get_logger

logger = get_logger(__name__)

VOCABULARY_SIZES = (4096, 8192, 16384, 32768)
TOP_NS = (0, 64)
NUM_SLOTS = 2  # of the block that is timed
REQUEST_COUNTS = (1, 8)
CONTEXT_TOKENS = 64
NUM_TIMINGS = 7

WriteDrafter = Callable[[DrafterForm, Path], DraftEngine]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the recipe leaves open: None of a field means that measuring decides."""

    draft_vocab: int | str  # auto, all or a number of ids
    precision: DrafterPrecision | None
    markov_top_n: int | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen with the whole vocabulary."""

    ranked_ids: NDArray[np.int64]  # [V] every id, the most frequent first
    accepted_ids: NDArray[np.int64]  # ids of accepted drafts, from prompts that ranked nothing
    accepted_per_block: float  # drafts of the first NUM_SLOTS slots
    plain_ms: dict[int, float]  # milliseconds of a plain step by requests


def evidence_of(recorder: Recorder, *, gamma: int, vocab_size: int, plain_ms: dict[int, float]) -> Evidence:
    """Rank by the blocks of one half of the prompts, look at acceptance in the other half."""
    recording = recorder.recording(gamma)
    ranks = recording.groups % 2 == 0
    written = np.concatenate((recording.draft_ids[ranks].ravel(), recording.target_ids[ranks]))
    counts = np.bincount(written, minlength=vocab_size)
    # an id that was never written comes behind those that were, by its own number
    ranked = np.lexsort((np.arange(vocab_size), -counts))
    survival = np.cumprod(recording.acceptance, axis=1)
    is_kept = survival[~ranks, :NUM_SLOTS] > 0.5
    accepted = recording.draft_ids[~ranks, :NUM_SLOTS][is_kept]
    mean = float(survival[:, :NUM_SLOTS].sum(axis=1).mean()) if len(recording) else 0.0
    return Evidence(ranked, accepted, mean, plain_ms)


def vocabulary(ranked_ids: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The `size` most frequent ids, ascending."""
    return np.sort(ranked_ids[:size])


def candidates(asked: Asked, evidence: Evidence, vocab_size: int) -> list[DrafterForm]:
    """Forms that the recipe leaves open, the plain one first. Raises ExportError where it asks for too many logits."""
    precisions: Sequence[DrafterPrecision] = ("fp32", "int8") if asked.precision is None else (asked.precision,)
    if asked.draft_vocab == "all":
        sizes: list[int] = [vocab_size]
    elif asked.draft_vocab == "auto":
        sizes = [vocab_size, *(size for size in VOCABULARY_SIZES if size <= vocab_size // 2)]
    else:
        sizes = [min(int(asked.draft_vocab), vocab_size)]
    check_top_n(sizes[0], asked.markov_top_n or 0)
    top_ns = TOP_NS if asked.markov_top_n is None else (asked.markov_top_n,)
    forms = []
    for size in sizes:
        ids = None if size == vocab_size else vocabulary(evidence.ranked_ids, size)
        for precision in precisions:
            if precision == "fp32" and size < vocab_size and len(precisions) > 1:
                continue  # eight bits were never slower where fewer ids were faster
            forms += [DrafterForm(precision, ids, top_n) for top_n in top_ns if top_n < size]
    return forms


def choose(
    forms: Sequence[DrafterForm],
    evidence: Evidence,
    write: WriteDrafter,
    *,
    vocab_size: int,
    progress: Progress = lambda fraction: None,
) -> tuple[DrafterForm, list[dict[str, Any]]]:
    """The best of `forms`, and what was found of each. `write` makes a drafter's graphs in a folder and opens them."""
    if len(forms) == 1:
        return forms[0], []
    found: list[dict[str, Any]] = []
    for number, form in enumerate(forms):
        with tempfile.TemporaryDirectory() as folder:
            engine = write(form, Path(folder))
            draft_ms = {
                count: _time_draft(engine, count) for count in REQUEST_COUNTS if count <= engine.limits.max_requests
            }
        covered = 1.0
        if form.draft_vocab is not None and len(evidence.accepted_ids):
            covered = float(np.isin(evidence.accepted_ids, form.draft_vocab).mean())
        gains = [
            (1 + evidence.accepted_per_block * covered) / (1 + ms / evidence.plain_ms[count])
            for count, ms in draft_ms.items()
        ]
        found.append(
            {
                "precision": form.precision,
                "num_draft_ids": vocab_size if form.draft_vocab is None else len(form.draft_vocab),
                "markov_top_n": form.markov_top_n,
                "draft_ms": {str(count): round(ms, 3) for count, ms in draft_ms.items()},
                "share_of_accepted_drafts": round(covered, 4),
                "expected_gain": round(float(np.mean(gains)), 4),
            }
        )
        progress((number + 1) / len(forms))
    best = int(np.argmax([each["expected_gain"] for each in found]))
    logger.info("drafter: %s", found[best])
    return forms[best], found


def _time_draft(engine: DraftEngine, num_requests: int) -> float:
    """Median milliseconds of a block."""
    rows = np.arange(num_requests, dtype=np.int64)
    batch = DraftBatch(
        rows=rows,
        anchor_ids=rows,
        past_lengths=np.full(num_requests, min(CONTEXT_TOKENS, engine.limits.max_seq_len - engine.gamma - 1), np.int64),
        temperatures=np.zeros(num_requests, np.float32),
        uniforms=np.zeros((num_requests, min(NUM_SLOTS, engine.gamma)), np.float32),
        wants_logits=False,
    )
    times = []
    for _ in range(NUM_TIMINGS + 1):
        started = time.perf_counter()
        engine.draft(batch)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[1:])
