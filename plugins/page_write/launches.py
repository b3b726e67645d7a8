"""The kernel of a PageWrite and its one launch. Needs nothing but Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dspark_trt_plugins.operation import Extents, Kernel, Launch, Tensor, attributes_of, next_power_of_2
from dspark_trt_plugins.page_write.form import PageWriteForm

LARGEST_BLOCK = 1024  # numbers that a program copies at a time
_KERNEL = "write_token"


@dataclass(frozen=True, slots=True)
class PageWriteOperation:
    """`operation.Operation` of one form."""

    form: PageWriteForm

    @property
    def name(self) -> str:
        return "PageWrite"

    @property
    def package(self) -> str:
        return "dspark_trt_plugins.page_write"

    @property
    def attributes(self) -> Mapping[str, int | str]:
        return attributes_of(self.form)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        form = self.form
        packed = ("T", form.num_kv_heads * form.head_dim)
        return (
            Tensor("keys", form.element_type, packed),
            Tensor("values", form.element_type, packed),
            Tensor("slots", "int64", ("T",)),
            Tensor("pages", form.element_type, self._pool),
        )

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor("written", self.form.element_type, self._pool, alias_of="pages"),)

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (Kernel(_KERNEL, f"kernel.{_KERNEL}"),)

    @property
    def arguments(self) -> Mapping[str, str | int | None]:
        form = self.form
        return {
            **{name: name for name in ("keys", "values", "slots", "written")},
            "NUM_KV_HEADS": form.num_kv_heads,
            "PAGE_POSITIONS": form.page_positions,
            "H": form.head_dim,
            "BLOCK": min(next_power_of_2(form.num_kv_heads * form.head_dim), LARGEST_BLOCK),
        }

    def launches(self, extents: Extents) -> tuple[Launch, ...]:
        return (Launch(_KERNEL, (extents["T"], 1)),) if extents["T"] else ()

    @property
    def _pool(self) -> tuple[str | int, ...]:
        form = self.form
        return ("P", 2, form.num_kv_heads, form.page_positions, form.head_dim)
