"""Which kernels a RowAttention has, and the two launches of a call. Needs nothing but Python.

Shape letters: `B` rows, `N` query heads, `K` KV heads, `S` padded query length, `C` row capacity, `H` head dim, `P` splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dspark_trt_plugins.operation import ELEMENT_BYTES, Extents, Kernel, Launch, Tensor, attributes_of, next_power_of_2
from dspark_trt_plugins.row_attention.form import RowAttentionForm

# Query rows of one program: the heads that share a key head times the slots. A matrix product takes 16 or more.
QUERY_BLOCKS = (16, 32, 64)
QUERY_BLOCKS_FLOAT32 = (16,)  # without tensor cores a row costs registers
NARROWEST = 16  # of a matrix product
LARGEST_SUM = 64 * 128  # numbers that one program accumulates, in registers
TILE_BYTES = 16 * 1024  # of keys, and of values: with three stages in flight it fits the shared memory of every GPU
LARGEST_TILE = {"float32": 32, "float16": 128, "bfloat16": 128}  # positions
MANY_SCORES = 4096  # of a tile: 8 warps, so that nothing spills
SPLIT_POSITIONS = 256  # a split has no fewer: what it writes has to be little beside the keys and values that it reads
MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class RowAttentionOperation:
    """`operation.Operation` of one form."""

    form: RowAttentionForm

    @property
    def name(self) -> str:
        return "RowAttention"

    @property
    def package(self) -> str:
        return "dspark_trt_plugins.row_attention"

    @property
    def attributes(self) -> Mapping[str, int | str]:
        return attributes_of(self.form)

    @property
    def num_splits(self) -> int:
        """Programs that share the positions of a row, P."""
        return min(-(-self.form.capacity // SPLIT_POSITIONS), MAX_SPLITS)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        form = self.form
        cache = ("B", form.num_kv_heads, form.capacity, form.head_dim)
        return (
            Tensor("query", form.element_type, ("B", form.num_heads, "S", form.head_dim)),
            Tensor("keys", form.element_type, cache),
            Tensor("values", form.element_type, cache),
            Tensor("last_seen", "int64", ("B", "S")),
        )

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        form = self.form
        return (Tensor("attended", form.element_type, ("B", form.num_heads, "S", form.head_dim)),)

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        shape = ("B", self.form.num_heads, "S", self.num_splits)
        return (
            Tensor("accumulators", "float32", (*shape, self.form.head_dim)),
            Tensor("maxima", "float32", shape),
            Tensor("sums", "float32", shape),
        )

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        form = self.form
        is_float32 = form.element_type == "float32"
        blocks = {self._query_block(form.group_size * slots) for slots in range(1, form.num_slots + 1)}
        kernels = [
            Kernel(
                f"attend_split_{block}",
                "kernel.attend_split",
                {"BLOCK_Q": block},
                num_warps=8 if is_float32 or block * self._position_block >= MANY_SCORES else 4,
                num_stages=2 if is_float32 else 3,
            )
            for block in sorted(blocks)
        ]
        return (*kernels, Kernel("combine_splits", "kernel.combine_splits", num_warps=2))

    @property
    def arguments(self) -> Mapping[str, str | int | None]:
        form = self.form
        tensors = {tensor.name: tensor.name for tensor in (*self.inputs, *self.outputs, *self.workspace)}
        return {
            **tensors,
            "NUM_HEADS": form.num_heads,
            "NUM_KV_HEADS": form.num_kv_heads,
            "CAPACITY": form.capacity,
            "H": form.head_dim,
            "NUM_SPLITS": self.num_splits,
            "SPLIT_POSITIONS": SPLIT_POSITIONS,
            "BLOCK_S": next_power_of_2(form.num_slots),
            "BLOCK_C": self._position_block,
            "BLOCK_H": self._width,
            "BLOCK_P": next_power_of_2(self.num_splits),
        }

    def launches(self, extents: Extents) -> tuple[Launch, ...]:
        form, num_rows, num_slots = self.form, extents["B"], extents["S"]
        if num_slots > form.num_slots:
            raise ValueError(f"query: expected {form.num_slots} slots or fewer, found {num_slots}")
        if num_rows * num_slots == 0:
            return ()
        queries = form.group_size * num_slots  # of one key head
        block = self._query_block(queries)
        query_blocks = -(-queries // block)
        programs = num_rows * form.num_kv_heads * query_blocks
        return (
            Launch(
                f"attend_split_{block}",
                (programs, self.num_splits),
                {"num_slots": num_slots, "num_query_blocks": query_blocks},
            ),
            Launch("combine_splits", (num_rows * form.num_heads * num_slots, 1), {"num_slots": num_slots}),
        )

    @property
    def _width(self) -> int:
        """Of a head in registers, BLOCK_H."""
        return max(next_power_of_2(self.form.head_dim), NARROWEST)

    @property
    def _position_block(self) -> int:
        """Cache positions that are read at a time, BLOCK_C."""
        row_bytes = self._width * ELEMENT_BYTES[self.form.element_type]
        return min(max(TILE_BYTES // row_bytes, NARROWEST), LARGEST_TILE[self.form.element_type])

    def _query_block(self, queries: int) -> int:
        all_blocks = QUERY_BLOCKS_FLOAT32 if self.form.element_type == "float32" else QUERY_BLOCKS
        blocks = [block for block in all_blocks if block == NARROWEST or block * self._width <= LARGEST_SUM]
        return next((block for block in blocks if queries <= block), blocks[-1])
