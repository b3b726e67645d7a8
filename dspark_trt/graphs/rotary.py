"""Rotary position embedding of packed tokens.
Queries and keys of a layer are rotated together, which saves two nodes a layer.

It stays outside the attention operators: on ONNX Runtime that is 4 % faster for a one-token step than
GroupQueryAttention's own rotation, and every attention form gets the same queries and keys. The tables
have the model's element type, to which transformers casts them too.
"""

from __future__ import annotations

from dspark_trt.checkpoints.spec import DecoderSpec, RopeSpec
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.numbers import Numbers
from dspark_trt.graphs.rope import rope_tables


class Rotary:
    """Rotates heads of T packed tokens at `positions` [T], all below `num_positions`."""

    def __init__(
        self,
        builder: GraphBuilder,
        rope: RopeSpec,
        head_dim: int,
        numbers: Numbers,
        positions: str,
        num_positions: int,
    ) -> None:
        self._builder = builder
        cos, sin = rope_tables(rope, head_dim=head_dim, num_positions=num_positions)
        self._cos, self._sin = builder.constant(numbers.table(cos)), builder.constant(numbers.table(sin))
        self._positions = builder.op("Unsqueeze", positions, builder.vector(1))  # [T, 1]

    def rotate(self, x: str, num_heads: int) -> str:
        """[T, num_heads * H], as T sequences of one token: a sequence may not be longer than the tables."""
        axis = self._builder.vector(1)
        sequences = self._builder.op("Unsqueeze", x, axis)
        rotated = self._builder.op(
            "RotaryEmbedding", sequences, self._cos, self._sin, self._positions, num_heads=num_heads
        )
        return self._builder.op("Squeeze", rotated, axis)


def split_query_key(builder: GraphBuilder, spec: DecoderSpec, layer: int, query_key: str) -> tuple[str, str]:
    """[T, (N + K) * H] -> queries [T, N * H] and keys [T, K * H]."""
    shape = spec.shape_of(layer)
    sizes = builder.vector(spec.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
    query, key = builder.multi_op("Split", query_key, sizes, axis=1, outputs=(None, None))
    return query, key
