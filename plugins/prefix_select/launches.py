"""Which kernels a PrefixSelect has, and the five launches of a call. Needs nothing but Python.

Shape letters: `R` requests, `G` gamma, `T` packed tokens, `B` KV rows of the target's row group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dspark_trt_plugins.operation import Extents, Kernel, Launch, Tensor, attributes_of
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm

BLOCK_R = 64
BLOCK_DRAFTS = 64
BLOCK_OTHERS = 64
BLOCK_PACK = 64


@dataclass(frozen=True, slots=True)
class PrefixSelectOperation:
    """`operation.Operation` of one form."""

    form: PrefixSelectForm

    @property
    def name(self) -> str:
        return "PrefixSelect"

    @property
    def package(self) -> str:
        return "dspark_trt_plugins.prefix_select"

    @property
    def attributes(self) -> Mapping[str, int | str]:
        return attributes_of(self.form)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        gamma = self.form.gamma
        return (
            Tensor("confidence_logits", "float32", ("R", gamma)),
            Tensor("temperatures", "float32", (gamma,)),
            Tensor("caps", "int64", ("R",)),
            Tensor("is_forced", "int64", ("R",)),
            Tensor("anchor_ids", "int64", ("R",)),
            Tensor("draft_ids", "int64", ("R", gamma)),
            Tensor("past_lengths", "int64", ("R",)),
            Tensor("block_rows", "int64", ("R",)),
            Tensor("row_requests", "int64", ("B",)),
            Tensor("row_query_lengths", "int64", ("B",)),
            Tensor("token_index", "int64", ("T",)),
            Tensor("num_admitted", "int64", (1,)),
        )

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        shapes: dict[str, tuple[str | int, ...]] = {
            "verify_len": ("R",),
            "num_tokens": (1,),
            "first_tokens": ("R",),
            "token_requests": ("T",),
            "token_ids": ("T",),
            "positions": ("T",),
            "padded_indices": ("T",),
            "decode.tokens": ("B", self.form.gamma + 1),
            "decode.past_lengths": ("B",),
            "decode.query_lengths": ("B",),
        }
        return tuple(Tensor(name, "int64", shapes[name]) for name in self.form.output_names)

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        gamma = self.form.gamma
        return (
            Tensor("keys", "int64", (gamma, "R")),
            Tensor("ranks", "int32", (gamma, "R")),
        )

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        names = ("measure_survival", "rank_drafts", "admit_drafts", "pack_tokens", "pack_rows")
        return tuple(Kernel(name, f"kernel.{name}") for name in names)

    @property
    def arguments(self) -> Mapping[str, str | int | None]:
        tensors = {tensor.name: tensor.name for tensor in (*self.inputs, *self.outputs, *self.workspace)}
        return {
            **tensors,
            "group_tokens": "decode.tokens",
            "group_past_lengths": "decode.past_lengths",
            "group_query_lengths": "decode.query_lengths",
            "GAMMA": self.form.gamma,
            "BLOCK_R": BLOCK_R,
            "BLOCK_DRAFTS": BLOCK_DRAFTS,
            "BLOCK_OTHERS": BLOCK_OTHERS,
            "BLOCK_PACK": BLOCK_PACK,
        }

    def launches(self, extents: Extents) -> tuple[Launch, ...]:
        num_requests, num_packed, num_rows = extents["R"], extents["T"], extents["B"]
        if num_requests == 0:
            return ()
        count = {"num_requests": num_requests}
        drafts = num_requests * self.form.gamma
        return (
            Launch("measure_survival", (-(-num_requests // BLOCK_R), 1), count),
            Launch("rank_drafts", (-(-drafts // BLOCK_DRAFTS), 1), count),
            Launch("admit_drafts", (1, 1), count),
            Launch("pack_tokens", (-(-num_packed // BLOCK_PACK), 1), count | {"num_packed": num_packed}),
            Launch("pack_rows", (-(-num_rows // BLOCK_PACK), 1), {"num_rows": num_rows}),
        )
