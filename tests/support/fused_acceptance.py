"""Acceptance by the device engine on the CPU device, where the operation's reference computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from dspark_trt_plugins.acceptance.form import AcceptanceForm
from dspark_trt_plugins.acceptance.launches import AcceptanceOperation

from dspark_trt.contract.acceptance import AcceptBatch, AcceptOutcomes
from dspark_trt.engines.device.acceptance import DeviceAcceptance
from dspark_trt.runtime.acceptance import Acceptance
from dspark_trt.runtime.drafting import DraftBlock, DraftVocabulary
from dspark_trt.runtime.fused_acceptance import Decided, accept_batch, results_of
from dspark_trt.runtime.verification import Segment


def open_acceptance(
    vocab_size: int, num_slots: int, *, max_requests: int = 8, draft_vocab: np.ndarray | None = None
) -> DeviceAcceptance:
    vocabulary = DraftVocabulary.of(draft_vocab, vocab_size)
    form = AcceptanceForm(vocab_size, num_slots, draft_vocab_size=0 if draft_vocab is None else len(draft_vocab))
    columns = None if vocabulary is None else vocabulary.columns
    cpu = torch.device("cpu")
    return DeviceAcceptance(AcceptanceOperation(form), cpu, max_requests=max_requests, draft_columns=columns)


class AcceptanceOfArrays:
    """An AcceptEngine for engines of NumPy arrays, over that of the device."""

    def __init__(self, device: DeviceAcceptance) -> None:
        self._device = device
        self.num_calls = 0

    def accept(self, batch: AcceptBatch, logits: Any, draft_logits: Any) -> Callable[[], AcceptOutcomes]:
        self.num_calls += 1
        drafts = None if draft_logits is None else torch.as_tensor(draft_logits)
        return self._device.accept(batch, torch.as_tensor(logits), drafts)


def accept_fused(segments: Sequence[Segment], logits: Any, block: DraftBlock | None) -> list[Acceptance]:
    """`runtime.acceptance.accept` by the engine."""
    vocabulary = None if block is None or block.vocabulary is None else block.vocabulary.ids
    most = max(len(segment.draft_ids) for segment in segments) + 1
    device = open_acceptance(logits.shape[-1], most, max_requests=len(segments), draft_vocab=vocabulary)
    draft_logits = None if block is None else block.draft_logits
    num_slots = 0 if draft_logits is None else draft_logits.shape[1]
    batch = accept_batch(segments, block, logits.shape[-1], num_slots)
    if batch is None:
        return [Acceptance() for _ in segments]
    found = AcceptanceOfArrays(device).accept(batch, logits, draft_logits)()
    return results_of(segments, Decided(batch, found))
