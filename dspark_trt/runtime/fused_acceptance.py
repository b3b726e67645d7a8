"""Acceptance by an engine that decides all rows of a step at once: what it is told, and what its answer means.

The rule is that of `runtime/acceptance.py`, whose slot loop serves engines without one. No request is left to that loop
here: all that edits logits (penalties, biases, bad_words, min_tokens) looks at tokens alone, and before a slot stand
drafts that the host knows.

Shape letters: `A` rows, one for every slot of every block; `E` edits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.contract.acceptance import (
    ACCEPTED,
    ALL_MASKED,
    NOT_FINITE,
    NOT_REACHED,
    AcceptBatch,
    AcceptEngine,
    AcceptOutcomes,
)
from dspark_trt.runtime.acceptance import NOT_FINITE_ERROR, Acceptance
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.edits import TokenEdits, token_edits
from dspark_trt.runtime.rng import Purpose
from dspark_trt.runtime.sampling import ALL_MASKED_ERROR, is_greedy
from dspark_trt.runtime.verification import Segment

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Decided:
    """A step's rows and what became of them."""

    batch: AcceptBatch
    found: AcceptOutcomes


def decide(
    engine: AcceptEngine | None, segments: Sequence[Segment], logits: Any, block: DraftBlock | None, vocab_size: int
) -> Decided | None:
    """What became of a step's rows, logits [L, V]; waits for it. None without an engine, or where no row is decided."""
    draft_logits = None if block is None else block.draft_logits
    num_slots = 0 if draft_logits is None else draft_logits.shape[1]
    batch = None if engine is None else accept_batch(segments, block, vocab_size, num_slots)
    return None if engine is None or batch is None else Decided(batch, engine.accept(batch, logits, draft_logits)())


def accept_batch(
    segments: Sequence[Segment], block: DraftBlock | None, vocab_size: int, num_block_slots: int
) -> AcceptBatch | None:
    """The rows of all segments that have logits; None where no segment has. num_block_slots: of the draft logits."""
    decided = [segment for segment in segments if segment.first_logit is not None]
    if not decided:
        return None
    num_rows = np.array([1 + len(segment.draft_ids) for segment in decided], dtype=np.int64)
    ends = np.cumsum(num_rows)
    first_rows = np.repeat(ends - num_rows, num_rows)
    slots = np.arange(ends[-1]) - first_rows
    is_draft = slots < np.repeat(num_rows - 1, num_rows)
    params = [segment.state.params for segment in decided]

    def each(values: Sequence[Any], kind: type[Any] = np.int64) -> NDArray[Any]:
        return np.repeat(np.array(values, dtype=kind), num_rows)

    temperatures = each([0.0 if is_greedy(p.temperature) else p.temperature for p in params], np.float32)
    block_rows = np.array([segment.block_row for segment in decided], dtype=np.int64)
    draft_temperatures = np.zeros(len(slots), dtype=np.float32)
    if block is not None and is_draft.any():
        has_drafts = num_rows > 1
        of_blocks = np.zeros(len(decided), dtype=np.float32)
        of_blocks[has_drafts] = block.temperatures[block_rows[has_drafts]]
        draft_temperatures = np.where(is_draft, np.repeat(of_blocks, num_rows), np.float32(0.0))
    is_drawn = draft_temperatures > 0
    top_k, top_p = each([p.top_k for p in params]), each([p.top_p for p in params], np.float32)
    is_sampled = temperatures > 0
    is_truncated = is_sampled & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1))
    sampled_rows = np.concatenate((np.flatnonzero(is_truncated), np.flatnonzero(is_sampled & ~is_truncated)))
    drawn_rows = np.flatnonzero(is_drawn)
    words = np.concatenate([s.state.words[:n] for s, n in zip(decided, num_rows.tolist(), strict=True)]).view(np.int64)
    edits = [
        token_edits(segment.state.processors, segment.draft_ids) if segment.state.processors.has_edits else None
        for segment in decided
    ]
    num_edits = np.array([0 if each_edits is None else len(each_edits.ids) for each_edits in edits], dtype=np.int64)
    edit_ends = np.cumsum(num_edits)
    all_edits = TokenEdits.concat([found for found in edits if found is not None])
    has_edits = np.repeat(num_edits > 0, num_rows)
    return AcceptBatch(
        logit_rows=each([segment.first_logit for segment in decided]) + slots,
        slots=slots,
        first_rows=first_rows,
        draft_ids=_draft_ids(decided),
        draft_rows=np.where(is_drawn, np.repeat(block_rows, num_rows) * num_block_slots + slots, 0),
        draws=_index_in(drawn_rows, len(slots)),
        samples=_index_in(sampled_rows, len(slots)),
        accept_words=words[:, Purpose.ACCEPT],
        residual_words=words[:, Purpose.RESIDUAL],
        bonus_words=words[:, Purpose.BONUS],
        top_k=top_k,
        edit_begins=np.repeat(edit_ends - num_edits, num_rows),
        edit_ends=np.repeat(edit_ends, num_rows),
        temperatures=temperatures,
        draft_temperatures=draft_temperatures,
        top_p=top_p,
        min_p=each([p.min_p for p in params], np.float32),
        repetition_penalties=each([p.repetition_penalty for p in params], np.float32),
        presence_penalties=each([p.presence_penalty for p in params], np.float32),
        frequency_penalties=each([p.frequency_penalty for p in params], np.float32),
        sampled_rows=sampled_rows,
        truncated_rows=sampled_rows[: int(is_truncated.sum())],
        drawn_rows=drawn_rows,
        edited_rows=np.flatnonzero(has_edits),
        reported_rows=np.flatnonzero(each([p.num_log_probs is not None for p in params], np.bool_)),
        edit_ids=all_edits.ids,
        edit_masks=all_edits.masks,
        edit_is_seen=all_edits.is_seen,
        edit_counts=all_edits.counts,
        edit_bias=all_edits.bias,
    )


def _draft_ids(segments: Sequence[Segment]) -> Ints:
    ids: list[int] = []
    for segment in segments:
        ids += [*segment.draft_ids, -1]
    return np.array(ids, dtype=np.int64)


def _index_in(rows: Ints, num_rows: int) -> Ints:
    """Of each row its index in `rows`, or -1."""
    index = np.full(num_rows, -1, dtype=np.int64)
    index[rows] = np.arange(len(rows))
    return index


def results_of(segments: Sequence[Segment], decided: Decided) -> list[Acceptance]:
    """One Acceptance for each segment, as `acceptance.accept` gives it: every token is pushed to its processors."""
    outcomes = decided.found.outcomes.tolist()
    reports = {row: place for place, row in enumerate(decided.batch.reported_rows.tolist())}
    results, first_row = [], 0
    for segment in segments:
        result = Acceptance()
        results.append(result)
        if segment.first_logit is None:
            continue
        for row in range(first_row, first_row + 1 + len(segment.draft_ids)):
            outcome = outcomes[row]
            assert outcome != NOT_REACHED, "a row behind the end of its block"
            if outcome in (NOT_FINITE, ALL_MASKED):
                result.error = NOT_FINITE_ERROR if outcome == NOT_FINITE else ALL_MASKED_ERROR
                break
            is_draft = row - first_row < len(segment.draft_ids)
            token_id = segment.draft_ids[row - first_row] if outcome == ACCEPTED else outcome
            segment.state.processors.push(token_id)
            result.token_ids.append(token_id)
            if row in reports:
                _report(result, decided.found, reports[row], segment.state.params.num_log_probs or 0, token_id)
            is_accepted = is_draft and token_id == segment.draft_ids[row - first_row] and outcome == ACCEPTED
            result.num_accepted_drafts += is_accepted
            if not is_accepted or token_id in segment.state.ending_ids:
                break
        first_row += 1 + len(segment.draft_ids)
    return results


def _report(result: Acceptance, found: AcceptOutcomes, place: int, num_alternatives: int, token_id: int) -> None:
    result.log_probs.append(float(found.log_probs[place]))
    top = zip(found.top_ids[place].tolist(), found.top_log_probs[place].tolist(), strict=True)
    result.top_log_probs.append(tuple(each for each in top if each[1] > -np.inf)[:num_alternatives])
