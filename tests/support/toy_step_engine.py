"""A StepEngine over the toy engines: it selects with PrefixSelect's NumPy reference, and answers late,
as a device does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.reference import prefix_select

from dspark_trt.contract.protocol import (
    DraftBatch,
    DraftOutput,
    HostDrafts,
    SelectBatch,
    SelectedOutput,
    TargetBatch,
    TargetOutput,
)
from tests.support.toy_engines import FailingEngine, ToyDrafter, ToyTarget


class ToyStepEngine(FailingEngine):
    """Drafts, selects and verifies. What it hands out holds NaN until `wait`, and again from the next call on.

    How many tokens are verified is computed from the SelectBatch before the draft runs, as a device has to.
    """

    def __init__(self, target: ToyTarget, drafter: ToyDrafter) -> None:
        super().__init__()
        self.target = target
        self.drafter = drafter
        self.selects: list[SelectBatch] = []
        self.edit_verify_lens: Callable[[np.ndarray], None] | None = None
        self._handed_out: list[np.ndarray] = []

    def draft_and_verify(self, draft: DraftBatch, select: SelectBatch, plain: TargetBatch) -> SelectedOutput:
        self._called("draft_and_verify")
        self._check(draft, select, plain)
        self.selects.append(select)
        for array in self._handed_out:
            array[:] = np.nan
        num_forced = int(select.caps[select.is_forced].sum())
        num_verified = num_forced + min(select.num_admitted, int(select.caps.sum()) - num_forced)
        drafted = ToyDrafter.draft(self.drafter, draft)  # NumPy arrays, whatever a subclass makes of them
        chosen = self._select(drafted, select, plain, num_verified)
        verified = ToyTarget.forward(self.target, self._with_drafts(plain, chosen))
        late = TargetOutput(logits=np.full_like(verified.logits, np.nan), taps=np.full_like(verified.taps, np.nan))
        late_logits = None if drafted.draft_logits is None else np.full_like(drafted.draft_logits, np.nan)
        self._handed_out = [array for array in (late_logits, late.logits, late.taps) if array is not None]

        def wait() -> HostDrafts:
            self._called("wait")
            if late_logits is not None:
                late_logits[:] = drafted.draft_logits
            late.logits[:], late.taps[:] = verified.logits, verified.taps
            verify_lens = chosen["verify_len"].copy()
            if self.edit_verify_lens:
                self.edit_verify_lens(verify_lens)
            return HostDrafts(
                draft_ids=drafted.draft_ids.copy(),
                confidence_logits=drafted.confidence_logits.copy(),
                verify_lens=verify_lens,
            )

        return SelectedOutput(wait=wait, draft_logits=late_logits, target=late)

    def _check(self, draft: DraftBatch, select: SelectBatch, plain: TargetBatch) -> None:
        num_drafting, num_decode = len(draft.rows), plain.num_decode
        assert 0 < num_drafting <= num_decode
        assert draft.rows.tolist() == plain.rows[:num_drafting].tolist(), "those that draft stand first"
        assert draft.anchor_ids.tolist() == plain.token_ids[:num_drafting].tolist()
        assert draft.past_lengths.tolist() == plain.past_lengths[:num_drafting].tolist()
        assert plain.query_lengths[:num_decode].tolist() == [1] * num_decode, "anchors alone"
        assert plain.logit_rows[:num_decode].tolist() == list(range(num_decode))
        assert select.caps.shape == select.is_forced.shape == (num_decode,)
        assert (select.caps.dtype, select.is_forced.dtype, select.temperatures.dtype) == (np.int64, bool, np.float32)
        assert (select.caps[:num_drafting] > 0).all()
        assert not select.caps[num_drafting:].any()
        assert select.caps.max() <= self.drafter.gamma == len(select.temperatures)
        assert select.num_admitted >= 0

    def _select(
        self, drafted: DraftOutput, select: SelectBatch, plain: TargetBatch, num_verified: int
    ) -> dict[str, np.ndarray]:
        num_requests, gamma = len(select.caps), self.drafter.gamma
        rows = plain.rows[:num_requests]
        draft_ids, confidence_logits = np.zeros((num_requests, gamma), np.int64), np.zeros((num_requests, gamma))
        is_token = (drafted.draft_ids >= 0) & (drafted.draft_ids < self.target.vocab_size)
        draft_ids[: len(is_token)] = np.where(is_token, drafted.draft_ids, 0)  # some embedding is looked up
        confidence_logits[: len(is_token)] = drafted.confidence_logits
        row_requests, row_query_lengths = np.zeros((2, int(rows.max()) + 1), np.int64)
        row_requests[rows], row_query_lengths[rows] = np.arange(num_requests), 1
        inputs = {
            "confidence_logits": confidence_logits,
            "temperatures": select.temperatures,
            "caps": select.caps,
            "is_forced": select.is_forced.astype(np.int64),
            "anchor_ids": plain.token_ids[:num_requests],
            "draft_ids": draft_ids,
            "past_lengths": plain.past_lengths[:num_requests],
            "block_rows": rows,
            "row_requests": row_requests,
            "row_query_lengths": row_query_lengths,
            "token_index": np.arange(num_requests + num_verified),
            "num_admitted": np.array([select.num_admitted]),
        }
        chosen = prefix_select(PrefixSelectForm(gamma), inputs)
        assert chosen["num_tokens"].tolist() == [num_requests + num_verified], "known before the draft"
        return chosen

    def _with_drafts(self, plain: TargetBatch, chosen: dict[str, np.ndarray]) -> TargetBatch:
        """The selected drafts behind their anchors, the prefill chunks behind all of them."""
        num_decode, num_tokens = plain.num_decode, len(chosen["token_ids"])
        prefill_rows = plain.logit_rows[num_decode:] + num_tokens - num_decode
        return TargetBatch(
            token_ids=np.concatenate([chosen["token_ids"], plain.token_ids[num_decode:]]),
            rows=plain.rows,
            past_lengths=plain.past_lengths,
            query_lengths=np.concatenate([1 + chosen["verify_len"], plain.query_lengths[num_decode:]]),
            num_decode=num_decode,
            logit_rows=np.concatenate([np.arange(num_tokens), prefill_rows]),
        )
