"""Linear layers that Phi-3 stores as one, taken apart: q, k and v; gate and up.

Each part is some rows of the whole, so it lies contiguously in the file where the whole does.
Source: the modelling code of Phi-3 in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.derived import Derived, DerivedStore
from dspark_trt.checkpoints.spec import DecoderSpec, TensorInfo, WeightStore
from dspark_trt.errors import CheckpointError

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of an element


def with_parts(weights: WeightStore, decoder: DecoderSpec, where: str) -> WeightStore:
    """The same weights under canonical names.

    Raises CheckpointError for a fused matrix that is missing or of another shape.
    """
    query, key_value = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    inner = decoder.intermediate_size
    fused = {
        "self_attn.qkv_proj": {"self_attn.q_proj": query, "self_attn.k_proj": key_value, "self_attn.v_proj": key_value},
        "mlp.gate_up_proj": {"mlp.gate_proj": inner, "mlp.up_proj": inner},
    }
    names, derived = frozenset(weights.names()), {}
    for layer in range(decoder.num_layers):
        for whole, parts in fused.items():
            name, expected = f"layers.{layer}.{whole}.weight", (sum(parts.values()), decoder.hidden_size)
            found = weights.info(name).shape if name in names else None
            if found != expected:
                shown = "none" if found is None else list(found)
                raise CheckpointError(
                    f"{where}: tensor {name}: expected shape {list(expected)}, found {shown}; the weights and the "
                    "configuration do not belong together"
                )
            start = 0
            for part, rows in parts.items():
                derived[f"layers.{layer}.{part}.weight"] = _part(weights, name, start, rows)
                start += rows
    return DerivedStore(weights, derived)


def _part(weights: WeightStore, name: str, start: int, rows: int) -> Derived:
    info = weights.info(name)
    part = TensorInfo(info.dtype, (rows, info.shape[1]))
    if info.offset is not None and info.dtype in _BYTES:
        part = replace(part, file=info.file, offset=info.offset + start * info.shape[1] * _BYTES[info.dtype])
    return Derived(part, (name,), partial(_rows, weights, name, start, rows))


def _rows(weights: WeightStore, name: str, start: int, rows: int) -> NDArray[np.generic]:
    return weights.array(name)[start : start + rows]
