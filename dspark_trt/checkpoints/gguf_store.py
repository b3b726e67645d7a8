"""Tensors of a GGUF file under canonical names, de-quantised to float32.

llama.cpp rotates neighbouring pairs of a head's rows, Hugging Face the two halves of a head. Its converter therefore
stores the Q and K rows of the Llama family interleaved; this is undone here. The Qwen families run with half-split
rotation there too, and are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.layout import EMBEDDING, HEAD
from dspark_trt.checkpoints.spec import TensorInfo
from dspark_trt.errors import CheckpointError

ROPE_FREQUENCIES = "rope_freqs.weight"

_WHOLE_MODEL = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "norm.weight",
    "output.weight": HEAD,
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate",
    "ffn_up_exps": "mlp.experts.up",
    "ffn_down_exps": "mlp.experts.down",
}


class GgufStore:
    """A WeightStore over the tensors of a reader.
    `permuted_heads` says how many heads the rows of a tensor interleave."""

    def __init__(self, path: Path, tensors: Mapping[str, Any], permuted_heads: Mapping[str, int]) -> None:
        self._path = path
        self._tensors = dict(sorted(tensors.items()))
        self._permuted_heads = permuted_heads

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        shape = tuple(int(extent) for extent in reversed(tensor.shape))  # GGUF counts the fastest dimension first
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32 and name not in self._permuted_heads:
            return TensorInfo("float32", shape, self._path, int(tensor.data_offset))
        return TensorInfo("float32", shape)

    def array(self, name: str) -> NDArray[np.generic]:
        tensor = self._tensors[name]
        try:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise CheckpointError(
                f"{self._path}: tensor {name} is quantised as {tensor.tensor_type.name}, which the gguf package cannot "
                "de-quantise; use a file of another quantisation (Q8_0, Q4_K, F16, ...)"
            ) from None
        array = array.astype(np.float32, copy=False).reshape(self.info(name).shape)
        heads = self._permuted_heads.get(name)
        result: NDArray[np.generic] = array if heads is None else _undo_permutation(array, heads)
        return result


def canonical_name(name: str) -> str:
    """The canonical name of a GGUF tensor; a name that is not known stays as it is."""
    if name in _WHOLE_MODEL:
        return _WHOLE_MODEL[name]
    prefix, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    module, _, kind = rest.rpartition(".")
    if prefix == "blk" and module in _LAYER:
        return f"layers.{index}.{_LAYER[module]}.{kind}"
    return name


def _undo_permutation(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """[heads * H, ...] with rows (pair, half) of each head -> rows (half, pair)."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
