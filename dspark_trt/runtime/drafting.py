"""The block of drafts: what is asked of the drafter, what came of it, and what was looked up besides.

Shape letters: `R` requests that draft, `n` slots drafted, `V` vocabulary, `W` draft vocabulary, `A` rows of the block.
Source: paper section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from dspark_trt.contract.protocol import DraftBatch
from dspark_trt.runtime.arrays import index_array, take_rows, to_host
from dspark_trt.runtime.kv import CacheLengths
from dspark_trt.runtime.lookup import Lookup
from dspark_trt.runtime.rng import Purpose, uniforms_float32
from dspark_trt.runtime.sampling import is_greedy, softmax_weights
from dspark_trt.runtime.state import RequestState

Array = Any  # of the engine's library

NO_TOKEN = -1


def draft_batch(states: Sequence[RequestState], context: CacheLengths, num_slots: int) -> DraftBatch:
    """One block of num_slots for each request. Only requests that sample need the logits that drafts are drawn from."""
    rows = np.array([state.row for state in states], dtype=np.int64)
    temperatures = np.array([_draft_temperature(state) for state in states], dtype=np.float32)
    uniforms = np.zeros((len(states), num_slots), dtype=np.float32)  # nobody reads those of an argmax
    if wants_logits := bool(temperatures.any()):
        uniforms = uniforms_float32(np.stack([state.words[:num_slots, Purpose.DRAFT] for state in states]))
    return DraftBatch(
        rows=rows,
        anchor_ids=np.array([state.anchor_id for state in states], dtype=np.int64),
        past_lengths=context.committed[rows],
        temperatures=temperatures,
        uniforms=uniforms,
        wants_logits=wants_logits,
    )


def _draft_temperature(state: RequestState) -> float:
    """The request's own temperature; exactly 0, the drafter's mark for argmax, when it counts as greedy."""
    return 0.0 if is_greedy(state.params.temperature) else state.params.temperature


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Which target ids the columns of draft logits stand for."""

    ids: NDArray[np.int64]  # [W], ascending
    columns: NDArray[np.int64]  # [V], the column of a target id, -1: the drafter cannot propose it

    @classmethod
    def of(cls, ids: NDArray[np.int64] | None, vocab_size: int) -> DraftVocabulary | None:
        """None: every id, column by column."""
        if ids is None:
            return None
        columns = np.full(vocab_size, -1, dtype=np.int64)
        columns[ids] = np.arange(len(ids))
        return cls(ids, columns)


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The drafts of one step and the distributions they were drawn from.

    The drafter's requests come first; those whose drafts were looked up have neither logits nor confidences.
    """

    draft_ids: NDArray[np.int64]  # [R, n] target ids
    draft_logits: Array | None  # [R_d, n, W] float32, before the temperature; None: every draft is an argmax
    temperatures: NDArray[np.float32]  # [R], as they were drawn with; 0: argmax
    confidence_logits: NDArray[np.float32]  # [R_d, n]
    num_usable: NDArray[np.int64]  # [R], drafts before the first id outside the vocabulary
    vocabulary: DraftVocabulary | None = None

    def draft_probs(self, slot: int, rows: Sequence[int]) -> Array:
        """p_d of slot `slot` + 1 for rows of the block that sample, [A, W]: what its draft was really drawn from.

        NaN where logits are not usable.
        """
        assert self.draft_logits is not None, "requests that sample ask for their logits"
        logits = take_rows(self.draft_logits[:, slot, :], rows)
        with np.errstate(invalid="ignore", over="ignore"):
            probs = softmax_weights(logits, self.temperatures[list(rows)].tolist())
            probs /= array_namespace(probs).sum(probs, axis=-1, keepdims=True)
        return probs

    def prob_of_drafts(self, slot: int, rows: Sequence[int], draft_probs: Array) -> Array:
        """p_d of the drafts of rows that sample, [A], from their draft_probs [A, W].

        A draft outside the draft vocabulary comes from a drafter out of order: 0, as if it had not been proposed.
        """
        ids = self.draft_ids[list(rows), slot]
        columns = ids if self.vocabulary is None else self.vocabulary.columns[ids]
        index = index_array([list(range(len(rows))), columns.tolist()], draft_probs)
        return array_namespace(draft_probs).where(index[1] >= 0, draft_probs[index[0], index[1]], 0.0)


def draft_block(
    batch: DraftBatch,
    draft_logits: Array | None,
    draft_ids: Array,
    confidence_logits: Array,
    vocabulary: DraftVocabulary | None,
    vocab_size: int,
) -> DraftBlock:
    """The block of a call; waits for what the host has to know of it, ids and confidences."""
    host_ids = to_host(draft_ids)
    is_token = (host_ids >= 0) & (host_ids < vocab_size)
    return DraftBlock(
        draft_ids=host_ids,
        draft_logits=draft_logits,
        temperatures=batch.temperatures,
        confidence_logits=to_host(confidence_logits),
        num_usable=np.cumprod(is_token, axis=1, dtype=np.int64).sum(axis=1),
        vocabulary=vocabulary,
    )


def with_lookups(block: DraftBlock | None, lookups: Sequence[Lookup]) -> DraftBlock | None:
    """The drafter's block, and behind it one row for each lookup, as if an argmax had drafted it; shorter rows end in
    ids that are no tokens. None where there is neither."""
    if not lookups:
        return block
    num_drafted, num_drafted_slots = (0, 0) if block is None else block.draft_ids.shape
    lengths = [len(lookup.draft_ids) for lookup in lookups]
    draft_ids = np.full((num_drafted + len(lookups), max([num_drafted_slots, *lengths])), NO_TOKEN, dtype=np.int64)
    for row, lookup in enumerate(lookups, start=num_drafted):
        draft_ids[row, : len(lookup.draft_ids)] = lookup.draft_ids
    if block is None:
        nothing = np.empty((0, 0), dtype=np.float32)
        return DraftBlock(draft_ids, None, np.zeros(len(lookups), np.float32), nothing, np.array(lengths))
    draft_ids[:num_drafted, :num_drafted_slots] = block.draft_ids
    return replace(
        block,
        draft_ids=draft_ids,
        temperatures=np.concatenate((block.temperatures, np.zeros(len(lookups), np.float32))),
        num_usable=np.concatenate((block.num_usable, lengths)),
    )
