"""Which kernels a RowAttention has, and the launches of a call: two, or one without splits. Needs nothing but Python.

Shape letters: `B` rows, `N` query heads, `K` KV heads, `S` padded query length, `C` row capacity, `H` head dim, `P`
splits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from dspark_trt_plugins.operation import ELEMENT_BYTES, Extents, Kernel, Launch, Tensor, attributes_of, next_power_of_2
from dspark_trt_plugins.row_attention.form import RowAttentionForm

# Query rows of one program: the heads that share a key head times the slots. A matrix product takes 16 or more.
QUERY_BLOCKS = (16, 32, 64)
QUERY_BLOCKS_FLOAT32 = (16,)  # without tensor cores a row costs registers
NARROWEST = 16  # of a matrix product
WIDEST = 128  # of a head that more than the smallest block of queries is taken of: wider ones spill
TILE_BYTES = 16 * 1024  # of keys, and of values: with three stages in flight it fits the shared memory of every GPU
LARGEST_TILE = {"float32": 32, "float16": 128, "bfloat16": 128}  # positions
MANY_SCORES = 4096  # of a tile: 8 warps, so that nothing spills
SPLIT_POSITIONS = 256  # a split has no fewer: what it writes has to be little beside the keys and values that it reads
MAX_SPLITS = 16
QUERIES_WITHOUT_SPLITS = 128  # slots that keep a GPU busy by themselves, as prompt chunks do


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
        """Programs that share the positions of a row, P: many where queries are few."""
        form = self.form
        wanted = max(QUERIES_WITHOUT_SPLITS // form.num_slots, 1)
        return min(-(-form.capacity // SPLIT_POSITIONS), wanted, MAX_SPLITS)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return _inputs(self.form)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return _outputs(self.form)

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        return _workspace(self.form, self.num_splits)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        form = self.form
        is_float32 = form.element_type == "float32"
        blocks = {_query_block(form, form.group_size * slots) for slots in range(1, form.num_slots + 1)}
        kernels = [
            Kernel(
                f"attend_split_{block}",
                "kernel.attend_split",
                {"BLOCK_Q": block},
                num_warps=8 if is_float32 or block * _position_block(form) >= MANY_SCORES else 4,
                num_stages=2 if is_float32 else 3,
            )
            for block in sorted(blocks)
        ]
        if self.num_splits > 1:
            kernels.append(Kernel("combine_splits", "kernel.combine_splits", num_warps=2))
        return tuple(kernels)

    @property
    def arguments(self) -> Mapping[str, str | int | None]:
        return _arguments(self)

    def launches(self, extents: Extents) -> tuple[Launch, ...]:
        return _launches(self, extents["B"], extents["S"])


# A call of every layer of every step asks for these: they are made once.
@functools.cache
def _inputs(form: RowAttentionForm) -> tuple[Tensor, ...]:
    cache = ("B", form.num_kv_heads, form.capacity, form.head_dim)
    return (
        Tensor("query", form.element_type, ("B", form.num_heads, "S", form.head_dim)),
        Tensor("keys", form.element_type, cache),
        Tensor("values", form.element_type, cache),
        Tensor("last_seen", "int64", ("B", "S")),
    )


@functools.cache
def _outputs(form: RowAttentionForm) -> tuple[Tensor, ...]:
    return (Tensor("attended", form.element_type, ("B", form.num_heads, "S", form.head_dim)),)


@functools.cache
def _workspace(form: RowAttentionForm, num_splits: int) -> tuple[Tensor, ...]:
    if num_splits == 1:
        return ()
    shape = ("B", form.num_heads, "S", num_splits)
    return (
        Tensor("accumulators", "float32", (*shape, form.head_dim)),
        Tensor("maxima", "float32", shape),
        Tensor("sums", "float32", shape),
    )


@functools.cache
def _arguments(operation: RowAttentionOperation) -> Mapping[str, str | int | None]:
    form = operation.form
    return {
        **dict.fromkeys(("accumulators", "maxima", "sums")),
        **{tensor.name: tensor.name for tensor in (*operation.inputs, *operation.outputs, *operation.workspace)},
        "NUM_HEADS": form.num_heads,
        "NUM_KV_HEADS": form.num_kv_heads,
        "CAPACITY": form.capacity,
        "H": form.head_dim,
        "NUM_SPLITS": operation.num_splits,
        "SPLIT_POSITIONS": SPLIT_POSITIONS,
        "BLOCK_S": next_power_of_2(form.num_slots),
        "BLOCK_C": _position_block(form),
        "BLOCK_H": _width(form),
        "BLOCK_P": next_power_of_2(operation.num_splits),
    }


@functools.lru_cache(maxsize=1024)  # of the shapes of a few engines
def _launches(operation: RowAttentionOperation, num_rows: int, num_slots: int) -> tuple[Launch, ...]:
    form = operation.form
    if num_slots > form.num_slots:
        raise ValueError(f"query: expected {form.num_slots} slots or fewer, found {num_slots}")
    if num_rows * num_slots == 0:
        return ()
    queries = form.group_size * num_slots  # of one key head
    block = _query_block(form, queries)
    query_blocks = -(-queries // block)
    scalars = {"num_slots": num_slots, "num_query_blocks": query_blocks}
    attend = Launch(
        f"attend_split_{block}", (num_rows * form.num_kv_heads * query_blocks, operation.num_splits), scalars
    )
    if operation.num_splits == 1:
        return (attend,)
    return attend, Launch("combine_splits", (num_rows * form.num_heads * num_slots, 1), {"num_slots": num_slots})


def _width(form: RowAttentionForm) -> int:
    """Of a head in registers, BLOCK_H."""
    return max(next_power_of_2(form.head_dim), NARROWEST)


def _position_block(form: RowAttentionForm) -> int:
    """Cache positions that are read at a time, BLOCK_C."""
    row_bytes = _width(form) * ELEMENT_BYTES[form.element_type]
    return min(max(TILE_BYTES // row_bytes, NARROWEST), LARGEST_TILE[form.element_type])


def _query_block(form: RowAttentionForm, queries: int) -> int:
    all_blocks = QUERY_BLOCKS_FLOAT32 if form.element_type == "float32" else QUERY_BLOCKS
    blocks = all_blocks if _width(form) <= WIDEST else all_blocks[:1]
    return next((block for block in blocks if queries <= block), blocks[-1])
