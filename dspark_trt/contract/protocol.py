"""The seam between the runtime and the compiled engines.

Shape letters: `R` requests of the call, `G` gamma, `T` packed tokens of the call, `L` logit rows asked for,
`V` vocabulary, `D` hidden, `M` tap layers. What an engine computes is an array of its own library: numpy on a CPU host.
What the runtime makes for a call (ids, rows, lengths, temperatures, uniforms, caps) is numpy for every engine.

An engine owns the KV memory as `max_requests` rows. The runtime says which row a request lives in and how many of the
row's positions are valid (`past_lengths`); the engine never remembers lengths. A call writes K/V at positions
[past, past + query_length) of each row; what lies behind the length that the runtime commits is overwritten later.
Rows that a call does not name keep what they hold: the runtime reuses what ended requests left there.

Engines of a device own KV memory as pages that rows share (`PageLimits`): the runtime says in every call which pages
the rows have, in the order of their positions. Target and drafter have the same pages: page p of one and page p of the
other hold the same positions of the same request. What such an engine keeps by row beside pages, it keeps under the
row's number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = Any  # an array of the engine's library (array API); numpy on CPU
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Fixed at build time."""

    max_requests: int  # KV rows
    max_seq_len: int  # positions that a row can hold for a request
    max_batch_tokens: int  # packed tokens of one target call


@dataclass(frozen=True, slots=True)
class PageLimits:
    """The KV memory of engines with pages, fixed when they are opened."""

    num_pages: int  # pages 0 .. num_pages - 1; page 0 is nobody's
    page_positions: int
    table_width: int  # pages that a row has at most: max_seq_len and a draft block behind it fit
    num_block_positions: int  # positions behind the valid ones that a step of a row which decodes writes at most
    holds_context: bool = True  # the drafter's context stands in pages, too; False: in rows of its own

    def pages_for(self, num_positions: int) -> int:
        """Pages that so many positions take."""
        return -(-num_positions // self.page_positions)


@dataclass(frozen=True, slots=True)
class TargetBatch:
    """One target call: packed tokens, segment after segment; a segment is one request's tokens of this call.

    The first `num_decode` segments verify drafts (anchor + drafts, at most gamma + 1 tokens); the rest are prefill
    chunks.
    """

    token_ids: Int64  # [T]
    rows: Int64  # [R], KV row of each segment, no row twice
    past_lengths: Int64  # [R], valid positions of the row before this call
    query_lengths: Int64  # [R], tokens of the segment, >= 1; sums to T
    num_decode: int
    logit_rows: Int64  # [L], packed indices whose logits are wanted, ascending
    block_tables: Int64 | None = None  # [R, W] pages of each segment's row, 0 behind them; None: rows, not pages


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Valid until the next call of the engine (buffers may be reused)."""

    logits: Array  # [L, V] float32, raw
    taps: Array  # [T, M*D] in the engine's element type, outputs of the tap layers in the order of target_layer_ids


@dataclass(frozen=True, slots=True)
class IngestBatch:
    """Committed positions that enter the drafter's context, packed segment after segment.

    The runtime always gives both ids of a position; an engine reads what its family needs (`DrafterDims`): taps, the
    token at the position (a language model that drafts), or the token behind it (EAGLE-3), which is known by then: it
    is committed too, or it is the anchor. An engine may keep numbers of each row's last ingested position beside K/V;
    they move with the row.
    """

    taps: Array  # [T, M*D]; without tap layers M = 0
    rows: Int64  # [R]
    past_lengths: Int64  # [R], context positions already in the row
    query_lengths: Int64  # [R], >= 1; sums to T
    token_ids: Int64 | None = None  # [T] at each position; not needed where taps alone are read
    next_ids: Int64 | None = None  # [T] behind each position; not needed where taps alone are read
    block_tables: Int64 | None = None  # [R, W], as the target's


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """One draft block of n <= gamma slots for each of R requests (paper section 3.1).

    How the slots come about is the family's: all at once, or one after the other inside the call.
    """

    rows: Int64  # [R], no row twice
    anchor_ids: Int64  # [R]
    past_lengths: Int64  # [R], >= 1, context positions = position of the anchor
    temperatures: Float32  # [R], 0 = argmax
    uniforms: Float32  # [R, n] in [0, 1)
    wants_logits: bool = True  # whether somebody reads draft_logits: not where every draft is an argmax
    block_tables: Int64 | None = None  # [R, W], as the target's


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """Valid until the next call of the engine."""

    draft_ids: Array  # [R, n] int64 target ids, always in [0, V)
    draft_logits: (
        Array | None
    )  # [R, n, W] float32 over the draft vocabulary, finite: exactly what was drawn from, before the
    # temperature; None where nobody wants them
    confidence_logits: Array  # [R, n] float32, of the confidence head; without one, the margin of the draft logits


@dataclass(frozen=True, slots=True)
class SelectBatch:
    """How the drafts of a block are chosen on the device: `lagged_budget`, whose K is known before anything is drafted.

    R counts all requests that decode, those that draft first.
    """

    num_admitted: int  # K: so many drafts are admitted besides the forced ones, or all that are offered
    caps: Int64  # [R] drafts verified at most; 0: does not draft
    is_forced: NDArray[np.bool_]  # [R], verified at its cap
    temperatures: Float32  # [n], STS (paper section 3.2.1)


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """What the host has to know of a block that was selected on the device."""

    draft_ids: Int64  # [R_d, n] of the requests that drafted
    confidence_logits: Float32  # [R_d, n]
    verify_lens: Int64  # [R] of all requests that decode


@dataclass(frozen=True, slots=True)
class SelectedOutput:
    """A draft block and its verification. Device arrays are valid until the next call of the engines."""

    wait: Callable[[], HostDrafts]  # waits for the draft and its selection, not for the verification
    draft_logits: Array | None  # [R_d, n, W] float32
    target: TargetOutput  # logits of every decode token, then those asked for of the prefill chunks


class TargetEngine(Protocol):
    """Verifies: one forward pass of the target over packed tokens.

    `forward` and `move_row` raise EngineBuildError when the backend fails; the cache rows of that call are then
    undefined.
    """

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: TargetBatch) -> TargetOutput: ...

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """Copy the first `num_positions` of a row's K/V to another row, where nothing that stood behind them counts any
        more; `source` stays as it is, also where the copy fails. The same row twice: its first positions stay.
        With pages, what is kept by row beside them alone: pages follow their tables."""
        ...


class DraftEngine(Protocol):
    """Drafts: two entry points, because a step that does not draft still ingests."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def gamma(self) -> int: ...

    @property
    def draft_vocab(self) -> NDArray[np.int64] | None:
        """Target ids of the columns of draft_logits, ascending, [W]; None: every id."""
        ...

    def ingest(self, batch: IngestBatch) -> None: ...

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        """A draft block, after `ingest` where there is one: in one call of the backend where it can."""
        ...

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        """As the target's, of the context."""
        ...


class StepEngine(Protocol):
    """Target and drafter on one device: draft, select and verify are enqueued without waiting for the host."""

    def draft_and_verify(self, draft: DraftBatch, select: SelectBatch, plain: TargetBatch) -> SelectedOutput:
        """One draft block, the selection of its drafts, and their verification.

        `draft` is for the first R_d of the R requests that decode. `plain` is the step without drafts: its first R
        segments are the anchors alone, prefill chunks behind; the selected drafts are inserted behind their anchors.
        Raises EngineBuildError when the backend fails, CapacityError when the step exceeds the limits.
        """
        ...
