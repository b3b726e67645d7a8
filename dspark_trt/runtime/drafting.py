"""The drafter's two entry points: taps of committed positions go in, one draft block per request comes out.

Shape letters: `R` requests that draft, `G` gamma, `V` vocabulary, `T` tokens, `M`*`D` tap width.
Source: paper section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from dspark_trt.contract.protocol import DraftBatch, IngestBatch
from dspark_trt.runtime.arrays import index_array, take_rows, to_host
from dspark_trt.runtime.kv import CacheLengths
from dspark_trt.runtime.rng import Purpose, uniforms_float32
from dspark_trt.runtime.sampling import is_greedy, softmax_weights
from dspark_trt.runtime.state import Phase, RequestState

Array = Any  # of the engine's library


@dataclass(frozen=True, slots=True)
class PendingTaps:
    """Taps of positions that the last step committed and the drafter's context does not have yet."""

    states: list[RequestState]
    num_positions: list[int]  # of each state; sums to T
    taps: Array  # [T, M*D], a copy: it outlives the target's buffer

    def without_finished(self) -> PendingTaps:
        """Drop the requests that have ended in between."""
        is_kept = np.array([state.phase is not Phase.FINISHED for state in self.states])
        if is_kept.all():
            return self
        return PendingTaps(
            states=[state for state in self.states if state.phase is not Phase.FINISHED],
            num_positions=[count for count, kept in zip(self.num_positions, is_kept, strict=True) if kept],
            taps=take_rows(self.taps, np.flatnonzero(np.repeat(is_kept, self.num_positions))),
        )


def ingest_batch(pending: PendingTaps, context: CacheLengths) -> IngestBatch:
    rows = np.array([state.row for state in pending.states], dtype=np.int64)
    return IngestBatch(
        taps=pending.taps,
        rows=rows,
        past_lengths=context.committed[rows],
        query_lengths=np.array(pending.num_positions, dtype=np.int64),
    )


def draft_batch(states: Sequence[RequestState], context: CacheLengths, gamma: int) -> DraftBatch:
    rows = np.array([state.row for state in states], dtype=np.int64)
    words = np.stack([state.words[:gamma, Purpose.DRAFT] for state in states])
    return DraftBatch(
        rows=rows,
        anchor_ids=np.array([state.anchor_id for state in states], dtype=np.int64),
        past_lengths=context.committed[rows],
        temperatures=np.array([_draft_temperature(state) for state in states], dtype=np.float32),
        uniforms=uniforms_float32(words),
    )


def _draft_temperature(state: RequestState) -> float:
    """The request's own temperature; exactly 0, the drafter's mark for argmax, when it counts as greedy."""
    return 0.0 if is_greedy(state.params.temperature) else state.params.temperature


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The drafts of one step and the distributions they were drawn from."""

    draft_ids: NDArray[np.int64]  # [R, G]
    draft_logits: Array  # [R, G, V] float32, before the temperature
    temperatures: list[float]  # [R], as they were drawn with; 0: argmax
    confidence_logits: NDArray[np.float32] | None  # [R, G]
    num_usable: NDArray[np.int64]  # [R], drafts before the first id outside the vocabulary

    def draft_probs(self, slot: int, rows: list[int]) -> Array:
        """p_d of slot `slot` + 1 for some rows of the block, [A, V]: what its draft was really drawn from.

        Softmax of the draft logits, the point mass of the draft where it was an argmax. NaN where logits are not usable.
        """
        xp = array_namespace(self.draft_logits)
        temperatures = [self.temperatures[row] for row in rows]
        greedy = [at for at, temperature in enumerate(temperatures) if temperature == 0.0]
        logits = take_rows(self.draft_logits[:, slot, :], rows)
        if len(greedy) == len(rows):
            probs = xp.zeros_like(logits)
        else:
            with np.errstate(invalid="ignore", over="ignore"):
                probs = softmax_weights(logits, temperatures)
                probs /= xp.sum(probs, axis=-1, keepdims=True)
        if greedy:
            index = index_array([greedy, self.draft_ids[[rows[at] for at in greedy], slot].tolist()], probs)
            if len(greedy) < len(rows):
                probs[index[0], :] = 0.0
            probs[index[0], index[1]] = 1.0
        return probs


def draft_block(
    batch: DraftBatch, draft_logits: Array, draft_ids: Array, confidence_logits: Array | None
) -> DraftBlock:
    """The block of a call; waits for what the host has to know of it, ids and confidences."""
    host_ids = to_host(draft_ids)
    is_token = (host_ids >= 0) & (host_ids < draft_logits.shape[-1])
    return DraftBlock(
        draft_ids=host_ids,
        draft_logits=draft_logits,
        temperatures=batch.temperatures.tolist(),
        confidence_logits=None if confidence_logits is None else to_host(confidence_logits),
        num_usable=np.cumprod(is_token, axis=1, dtype=np.int64).sum(axis=1),
    )
