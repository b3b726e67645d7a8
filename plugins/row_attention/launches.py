"""Which kernels a RowAttention has, and the launches of a call: two for the rows that come first and two for prompt
chunks, one where nothing is split. Needs nothing but Python.

How many splits: a GPU is busy when it has two programs for each multiprocessor. A program reads the keys and values of
one key head for a block of queries; where rows, heads and queries make fewer programs than that, the positions of a row
are shared out, in splits that are the longer the more programs there are already. Where they make twice as many, no row
is split. Rows of a launch may have fewer queries than its longest one: programs beyond a row's own end at once, and
count all the same.

Shape letters: `T` packed tokens, `B` rows: `D` of `S` queries at most, then `E` chunks of `X` at most; `N` query heads,
`K` KV heads, `H` head dim, `P` pages of the pool, `W` pages of a row.
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
MOST_SCORES = 4096  # of a tile
MANY_SCORES = 2048  # of a tile: from here on 8 warps, so nothing spills
WANTED_PROGRAMS = 256  # two for each multiprocessor of a large GPU: an H100 has 132
SHORTEST_SPLIT = 256  # positions: what a split writes has to be little beside the keys and values that it reads
LONGEST_SPLIT = 4096  # one long row among short ones must not keep the others waiting
SPLITS_OF_A_BUSY_GPU = 8  # of a row at most, which bounds the workspace
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Splits:
    """How the positions of a launch's rows are shared out."""

    count: int  # at most
    positions: int  # of a split, at least


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

    def splits(self, num_rows: int, num_slots: int) -> Splits:
        """Of a launch of these sizes."""
        return _splits(self.form.capacity, num_rows * self.form.num_kv_heads * self._query_blocks(num_slots))

    def _query_blocks(self, num_slots: int) -> int:
        """Of a key head of a row."""
        queries = self.form.group_size * num_slots
        return -(-queries // _query_block(self.form, queries))

    @property
    def max_splits(self) -> int:
        """Of any call: 1 where no row of the form's capacity is ever split."""
        return _splits(self.form.capacity, 1).count

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return _inputs(self.form)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return _outputs(self.form)

    @property
    def workspace(self) -> tuple[Tensor, ...]:
        return _workspace(self.form)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        form = self.form
        is_float32 = form.element_type == "float32"
        is_wide = is_float32 or _width(form) > WIDEST  # of registers
        kernels = [
            Kernel(
                f"attend_split_{block}",
                "kernel.attend_split",
                {"BLOCK_Q": block, "BLOCK_C": min(_position_block(form), MOST_SCORES // block)},
                num_warps=8 if is_wide or block * _position_block(form) >= MANY_SCORES else 4,
                num_stages=2 if is_float32 else 3,
            )
            for block in _query_blocks_of(form)
        ]
        if self.max_splits > 1:
            kernels.append(Kernel("combine_splits", "kernel.combine_splits", num_warps=2))
        return tuple(kernels)

    @property
    def arguments(self) -> Mapping[str, str | int | None]:
        return _arguments(self)

    def launches(self, extents: Extents) -> tuple[Launch, ...]:
        form, num_rows = self.form, extents["D"]
        rows = _launches(self, 0, num_rows, extents["S"], form.num_slots)
        if not form.num_chunk_slots:
            return rows
        return rows + _launches(self, num_rows, extents["E"], extents["X"], form.num_chunk_slots)


# A call of every layer of every step asks for these: they are made once.
@functools.cache
def _inputs(form: RowAttentionForm) -> tuple[Tensor, ...]:
    pool = ("P", 2, form.num_kv_heads, form.page_positions, form.head_dim)
    chunks = (Tensor("chunk_tokens", "int64", ("E", "X")),) if form.num_chunk_slots else ()
    return (
        Tensor("query", form.element_type, ("T", form.num_heads * form.head_dim)),
        Tensor("pages", form.element_type, pool),
        Tensor("first_tokens", "int64", ("B",)),
        Tensor("past_lengths", "int64", ("B",)),
        Tensor("query_lengths", "int64", ("B",)),
        Tensor("block_tables", "int64", ("B", form.table_width)),
        Tensor("row_tokens", "int64", ("D", "S")),  # this and the chunks' are there for their shapes
        *chunks,
    )


@functools.cache
def _outputs(form: RowAttentionForm) -> tuple[Tensor, ...]:
    return (Tensor("attended", form.element_type, ("T", form.num_heads * form.head_dim)),)


@functools.cache
def _workspace(form: RowAttentionForm) -> tuple[Tensor, ...]:
    """Of the launch whose splits leave most, since a compiler asks once for all calls."""
    fewest = [(programs, _splits(form.capacity, programs).count) for programs in range(1, 2 * WANTED_PROGRAMS)]
    num_parts = max((programs * count for programs, count in fewest if count > 1), default=0)
    if num_parts == 0:
        return ()
    num_parts *= max(_query_blocks_of(form))
    return (
        Tensor("accumulators", "float32", (num_parts, form.head_dim)),
        Tensor("maxima", "float32", (num_parts,)),
        Tensor("sums", "float32", (num_parts,)),
    )


@functools.cache
def _splits(capacity: int, programs: int) -> Splits:
    """Of rows that `programs` programs read without splits."""
    if programs >= 2 * WANTED_PROGRAMS:
        return Splits(1, capacity)
    wanted = -(-capacity * programs // WANTED_PROGRAMS)
    longest = max(LONGEST_SPLIT, capacity // SPLITS_OF_A_BUSY_GPU)
    count = min(max(capacity // min(max(wanted, SHORTEST_SPLIT), longest), 1), MAX_SPLITS)
    tile = max(LARGEST_TILE.values())
    return Splits(count, max(-(-capacity // (count * tile)) * tile, SHORTEST_SPLIT))


@functools.cache
def _arguments(operation: RowAttentionOperation) -> Mapping[str, str | int | None]:
    form = operation.form
    return {
        **dict.fromkeys(("accumulators", "maxima", "sums")),
        **{tensor.name: tensor.name for tensor in (*operation.inputs, *operation.outputs, *operation.workspace)},
        "NUM_HEADS": form.num_heads,
        "NUM_KV_HEADS": form.num_kv_heads,
        "PAGE_POSITIONS": form.page_positions,
        "TABLE_WIDTH": form.table_width,
        "H": form.head_dim,
        "IS_CAUSAL": int(form.is_causal),
        "BLOCK_SHARE": _position_block(form),
        "BLOCK_H": _width(form),
        "BLOCK_S": next_power_of_2(operation.max_splits),
    }


@functools.lru_cache(maxsize=1024)  # of the shapes of a few engines
def _launches(
    operation: RowAttentionOperation, first_row: int, num_rows: int, num_slots: int, most: int
) -> tuple[Launch, ...]:
    """Of the rows from `first_row` on, of `most` queries at most."""
    form = operation.form
    if num_slots > most:
        raise ValueError(f"query: expected {most} slots or fewer, found {num_slots}")
    if num_rows * num_slots == 0:
        return ()
    block = _query_block(form, form.group_size * num_slots)
    query_blocks = operation._query_blocks(num_slots)
    programs = num_rows * form.num_kv_heads * query_blocks
    splits = operation.splits(num_rows, num_slots)
    shared = {
        "first_row": first_row,
        "num_query_blocks": query_blocks,
        "num_splits": splits.count,
        "split_positions": splits.positions,
    }
    attend = Launch(f"attend_split_{block}", (programs, splits.count), shared)
    if splits.count == 1:
        return (attend,)
    return attend, Launch("combine_splits", (programs * block, 1), shared | {"block_queries": block})


def _width(form: RowAttentionForm) -> int:
    """Of a head in registers, BLOCK_H."""
    return max(next_power_of_2(form.head_dim), NARROWEST)


def _position_block(form: RowAttentionForm) -> int:
    """Cache positions of one page that are read at a time, BLOCK_C, unless that makes too many scores."""
    row_bytes = _width(form) * ELEMENT_BYTES[form.element_type]
    return min(max(TILE_BYTES // row_bytes, NARROWEST), LARGEST_TILE[form.element_type], form.page_positions)


def _query_block(form: RowAttentionForm, queries: int) -> int:
    all_blocks = QUERY_BLOCKS_FLOAT32 if form.element_type == "float32" else QUERY_BLOCKS
    blocks = all_blocks if _width(form) <= WIDEST else all_blocks[:1]
    return next((block for block in blocks if queries <= block), blocks[-1])


@functools.cache
def _query_blocks_of(form: RowAttentionForm) -> tuple[int, ...]:
    """The sizes that calls of the form take, rising."""
    most = max(form.num_slots, form.num_chunk_slots)
    return tuple(sorted({_query_block(form, form.group_size * slots) for slots in range(1, most + 1)}))
