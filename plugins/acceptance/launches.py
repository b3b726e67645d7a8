"""Which kernels an Acceptance has, and the order in which a call launches them. Needs nothing but Python.

    summarise, decide, choose                                   always
    summarise_drafts, weigh_drafts                              where drafts were drawn
    weigh, measure                                              where rows are sampled
    gather, cut                                                 where some of them have top_k or top_p
    edit, restore                                               where logits are edited
    rank, report                                                where log probabilities are wanted

Shape letters: `A` rows that are decided, `L` logit rows, `D` draft rows, `V` vocabulary, `W` draft vocabulary, `S`
sampled rows, `T` those of them with top_k or top_p, `X` rows whose draft was drawn, `U` rows with edits, `E` edits, `P`
rows that report log probabilities; `C` segments of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dspark_trt_plugins.acceptance.form import MAX_TOP, AcceptanceForm
from dspark_trt_plugins.operation import (
    ElementType,
    Extents,
    Kernel,
    Launch,
    Tensor,
    attributes_of,
    next_power_of_2,
)

BINS = 256  # of the histogram of weights: four an octave
BLOCK_EDITS = 512
ROW_INPUTS: Mapping[str, ElementType] = {
    "logit_rows": "int64",  # row of `logits`
    "slots": "int64",  # place in the block, from 0
    "first_rows": "int64",  # the row of slot 0 of the same block
    "draft_ids": "int64",  # -1: nothing was drafted, the token here is the bonus
    "draft_rows": "int64",  # row of `draft_logits`; 0 where the draft is an argmax
    "draws": "int64",  # index in `drawn_rows`; -1: the draft is an argmax
    "samples": "int64",  # index in `sampled_rows`; -1: the token is the argmax
    "accept_words": "int64",  # 64 random bits each
    "residual_words": "int64",
    "bonus_words": "int64",
    "top_k": "int64",  # 0: off
    "edit_begins": "int64",  # of the block's edits
    "edit_ends": "int64",
    "temperatures": "float32",  # 0: greedy
    "draft_temperatures": "float32",
    "top_p": "float32",  # 1: off
    "min_p": "float32",  # 0: off
    "repetition_penalties": "float32",
    "presence_penalties": "float32",
    "frequency_penalties": "float32",
}
LIST_INPUTS: Mapping[str, str] = {  # rows by letter
    "sampled_rows": "S",  # those with top_k or top_p first
    "truncated_rows": "T",  # the first of them
    "drawn_rows": "X",
    "edited_rows": "U",
    "reported_rows": "P",
}
EDIT_INPUTS: Mapping[str, ElementType] = {
    "edit_ids": "int64",  # no token twice in a block
    "edit_masks": "int64",  # bit s: must not come in slot s
    "edit_is_seen": "int64",  # 1: in the prompt or generated, so that repetition_penalty takes it
    "edit_counts": "float32",  # among the generated tokens
    "edit_bias": "float32",
}


@dataclass(frozen=True, slots=True)
class AcceptanceOperation:
    """`operation.Operation` of one form."""

    form: AcceptanceForm

    @property
    def name(self) -> str:
        return "Acceptance"

    @property
    def package(self) -> str:
        return "dspark_trt_plugins.acceptance"

    @property
    def attributes(self) -> Mapping[str, int | str]:
        return attributes_of(self.form)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        form = self.form
        columns = (Tensor("draft_columns", "int64", (form.vocab_size,)),) if form.draft_vocab_size else ()
        return (
            Tensor("logits", "float32", ("L", form.vocab_size)),
            Tensor("draft_logits", "float32", ("D", form.num_draft_columns)),
            *columns,
            *self.host_inputs,
        )

    @property
    def host_inputs(self) -> tuple[Tensor, ...]:
        """What the host makes for each call."""
        return (
            *(Tensor(name, element_type, ("A",)) for name, element_type in ROW_INPUTS.items()),
            *(Tensor(name, "int64", (letter,)) for name, letter in LIST_INPUTS.items()),
            *(Tensor(name, element_type, ("E",)) for name, element_type in EDIT_INPUTS.items()),
        )

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (
            Tensor("outcomes", "int64", ("A",)),
            Tensor("log_probs", "float32", ("P",)),
            Tensor("top_ids", "int64", ("P", MAX_TOP)),
            Tensor("top_log_probs", "float32", ("P", MAX_TOP)),
        )

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        form = self.form
        segments, draft_segments, blocks = form.num_segments, form.num_draft_segments, form.num_blocks
        return (
            Tensor("segment_max", "float32", ("A", segments)),
            Tensor("segment_argmax", "int32", ("A", segments)),
            Tensor("segment_bad", "int32", ("A", segments)),
            Tensor("draft_max", "float32", ("X", draft_segments)),
            Tensor("draft_bad", "int32", ("X", draft_segments)),
            Tensor("draft_mass", "int64", ("X", draft_segments)),
            Tensor("segment_mass", "int64", ("S", segments)),
            Tensor("bin_counts", "int32", ("T", segments, BINS)),
            Tensor("num_candidates", "int32", ("T",)),
            Tensor("candidate_ids", "int32", ("T", form.num_candidates)),
            Tensor("candidate_weights", "float32", ("T", form.num_candidates)),
            Tensor("thresholds", "int32", ("S",)),
            Tensor("last_ties", "int32", ("S",)),
            Tensor("kept_mass", "int64", ("S",)),
            Tensor("verdicts", "int32", ("A",)),
            Tensor("target_mass", "int64", ("S", segments)),
            Tensor("residual_mass", "int64", ("S", segments)),
            Tensor("saved_logits", "float32", ("E", form.num_slots)),
            Tensor("block_max", "float32", ("P", blocks)),
            Tensor("block_sum", "float32", ("P", blocks)),
            Tensor("block_top", "float32", ("P", blocks, MAX_TOP)),
            Tensor("block_top_ids", "int32", ("P", blocks, MAX_TOP)),
        )

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (
            Kernel("rank", "kernel_report.rank", num_warps=8),
            Kernel("edit", "kernel_edits.edit"),
            Kernel("summarise", "kernel.summarise", num_warps=8),
            Kernel("summarise_drafts", "kernel.summarise_drafts", num_warps=8),
            Kernel("weigh_drafts", "kernel.weigh_drafts", num_warps=8),
            Kernel("weigh", "kernel.weigh", num_warps=8),
            Kernel("gather", "kernel_candidates.gather", num_warps=8),
            Kernel("cut", "kernel_border.cut", {"BLOCK": self.form.block_tokens // 2}, num_warps=8),
            Kernel("decide", "kernel_decision.decide", num_warps=1),
            Kernel("measure", "kernel_draw.measure", num_warps=8),
            Kernel("choose", "kernel_draw.choose", num_warps=8),
            Kernel("restore", "kernel_edits.restore"),
            Kernel("report", "kernel_report.report", num_warps=8),
        )

    @property
    def arguments(self) -> Mapping[str, str | int | None]:
        form = self.form
        tensors = {tensor.name: tensor.name for tensor in (*self.inputs, *self.outputs, *self.workspace)}
        return {
            "draft_columns": None,
            **tensors,
            "VOCAB": form.vocab_size,
            "DRAFT_VOCAB": form.num_draft_columns,
            "NUM_SLOTS": form.num_slots,
            "BLOCK": form.block_tokens,
            "SEGMENT": form.segment_tokens,
            "NUM_SEGMENTS": form.num_segments,
            "NUM_DRAFT_SEGMENTS": form.num_draft_segments,
            "BLOCK_SEGMENTS": next_power_of_2(form.num_segments),
            "BLOCK_DRAFT_SEGMENTS": next_power_of_2(form.num_draft_segments),
            "NUM_CANDIDATES": form.num_candidates,
            "NUM_BLOCKS": form.num_blocks,
            "BLOCK_BLOCKS": next_power_of_2(form.num_blocks),
            "BLOCK_SLOTS": next_power_of_2(form.num_slots),
            "BLOCK_EDITS": BLOCK_EDITS,
            "BINS": BINS,
            "MAX_TOP": MAX_TOP,
            "BLOCK_TOP": next_power_of_2(MAX_TOP),
        }

    def launches(self, extents: Extents) -> tuple[Launch, ...]:
        form, num_rows = self.form, extents["A"]
        if num_rows == 0:
            return ()
        segments, draft_segments = form.num_segments, form.num_draft_segments
        truncated = {"num_truncated": extents["T"]}
        in_order = (
            Launch("rank", (extents["P"], form.num_blocks)),
            Launch("edit", (extents["U"], 1)),
            Launch("summarise", (num_rows, segments)),
            Launch("summarise_drafts", (extents["X"], draft_segments)),
            Launch("weigh_drafts", (extents["X"], draft_segments)),
            Launch("weigh", (extents["S"], segments), truncated),
            Launch("gather", (extents["T"], segments)),
            Launch("cut", (extents["T"], 1), truncated),
            Launch("decide", (num_rows, 1), truncated),
            Launch("measure", (extents["S"], segments), truncated),
            Launch("choose", (num_rows, 1), truncated),
            Launch("restore", (extents["U"], 1)),
            Launch("report", (extents["P"], 1)),
        )
        return tuple(launch for launch in in_order if 0 not in launch.grid)
