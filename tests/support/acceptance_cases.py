"""Inputs of the operation Acceptance: blocks of drafts with parameters, as plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dspark_trt_plugins.acceptance.form import AcceptanceForm
from dspark_trt_plugins.acceptance.launches import EDIT_INPUTS, ROW_INPUTS
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Block:
    """One request's rows; `drafts` of -1 or fewer of them than slots need no logits of a drafter."""

    drafts: tuple[int, ...] = ()
    temperature: float = 1.0
    is_drawn: bool = True  # False: the drafts are an argmax's
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # id -> what it has: mask, is_seen, counts, bias
    edits: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    reports: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.drafts) + 1


def make_inputs(
    form: AcceptanceForm,
    blocks: Sequence[Block],
    logits: NDArray[np.float32],
    draft_logits: NDArray[np.float32] | None = None,
    seed: int = 0,
) -> Arrays:
    """logits [rows of all blocks, V], in this order; draft_logits [drafts of all blocks, W]."""
    random = np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {name: [] for name in ROW_INPUTS}
    edits: dict[str, list[Any]] = {name: [] for name in EDIT_INPUTS}
    num_drafts = first_row = 0
    for block in blocks:
        begin = len(edits["edit_ids"])
        for token, edit in block.edits.items():
            for name in EDIT_INPUTS:
                edits[name].append(token if name == "edit_ids" else edit.get(name.removeprefix("edit_"), 0))
        for slot in range(block.num_rows):
            has_draft = slot < len(block.drafts)
            values = {
                "logit_rows": first_row + slot,
                "slots": slot,
                "first_rows": first_row,
                "draft_ids": block.drafts[slot] if has_draft else -1,
                "draft_rows": num_drafts if has_draft else 0,
                "draws": num_drafts if has_draft and block.is_drawn and block.temperature else -1,
                "edit_begins": begin,
                "edit_ends": len(edits["edit_ids"]),
                "temperatures": block.temperature,
                "draft_temperatures": block.temperature,
                "repetition_penalties": block.repetition_penalty,
                "presence_penalties": block.presence_penalty,
                "frequency_penalties": block.frequency_penalty,
                "top_k": block.top_k,
                "top_p": block.top_p,
                "min_p": block.min_p,
            }
            num_drafts += has_draft
            for name, value in values.items():
                rows[name].append(value)
        first_row += block.num_rows
    for name in ("accept_words", "residual_words", "bonus_words"):
        rows[name] = random.integers(0, 2**64, first_row, dtype=np.uint64).view(np.int64).tolist()
    arrays = {name: np.array(rows[name], getattr(np, kind)) for name, kind in ROW_INPUTS.items() if name != "samples"}
    arrays |= {name: np.array(edits[name], getattr(np, kind)) for name, kind in EDIT_INPUTS.items()}
    sampled = np.flatnonzero(arrays["temperatures"])
    top_k = arrays["top_k"][sampled]
    is_truncated = ((top_k > 0) & (top_k < form.vocab_size)) | (arrays["top_p"][sampled] < 1)
    sampled = np.concatenate([sampled[is_truncated], sampled[~is_truncated]])
    samples = np.full(first_row, -1)
    samples[sampled] = np.arange(len(sampled))
    drawn = np.flatnonzero(arrays["draws"] >= 0)
    arrays["draws"][drawn] = np.arange(len(drawn))
    reports = np.repeat([block.reports for block in blocks], [block.num_rows for block in blocks])
    if draft_logits is None:
        draft_logits = np.zeros((1, form.num_draft_columns), np.float32)
    return arrays | {
        "logits": logits,
        "draft_logits": draft_logits,
        "samples": samples,
        "sampled_rows": sampled,
        "truncated_rows": sampled[: is_truncated.sum()],
        "drawn_rows": drawn,
        "edited_rows": np.flatnonzero(arrays["edit_ends"] > arrays["edit_begins"]),
        "reported_rows": np.flatnonzero(reports),
    }


def random_case(
    form: AcceptanceForm, blocks: Sequence[Block], seed: int = 0, spread: float = 3.0, steps: float = 0.0
) -> Arrays:
    """Logits of a drafter that is close to the target; drafts are drawn from it where they are given as -2. `steps`:
    logits are multiples of it, so that ties are common."""
    random = np.random.default_rng(seed)
    num_rows = sum(block.num_rows for block in blocks)
    logits = random.normal(0, spread, (num_rows, form.vocab_size))
    near = logits + random.normal(0, 0.7, logits.shape)
    if steps:
        logits, near = (np.round(values / steps) * steps for values in (logits, near))
    columns = np.arange(form.vocab_size)[:: max(form.vocab_size // max(form.num_draft_columns, 1), 1)]
    columns = columns[: form.num_draft_columns]
    draft_logits, drawn, row = [], [], 0
    for block in blocks:
        drafts = []
        for slot, draft in enumerate(block.drafts):
            values = near[row + slot][columns]
            draft_logits.append(values)
            if draft == -2:
                weights = np.exp((values - values.max()) / (block.temperature or 1.0))
                draft = int(columns[random.choice(len(columns), p=weights / weights.sum())])
                if not (block.is_drawn and block.temperature):
                    draft = int(columns[values.argmax()])
            drafts.append(draft)
        row += block.num_rows
        drawn.append(Block(**{**block.__dict__, "drafts": tuple(drafts)}))
    matrix = np.array(draft_logits, np.float32) if draft_logits else None
    inputs = make_inputs(form, drawn, logits.astype(np.float32), matrix, seed)
    if form.draft_vocab_size:
        inputs["draft_columns"] = np.full(form.vocab_size, -1)
        inputs["draft_columns"][columns] = np.arange(len(columns))
    return inputs
