"""Random RowAttention inputs, and a model of the function body."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from dspark_trt_plugins.body import OPSET
from dspark_trt_plugins.operation import NAMESPACE
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.function_body import row_attention_function, row_attention_node
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation
from numpy.typing import NDArray
from onnx import TensorProto, helper

Arrays = dict[str, NDArray[Any]]
NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
}
# Of the largest value, 1 here: weights are rounded to the element type before they meet the values, and so is the
# result.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


def random_rows(form: RowAttentionForm, last_seen: Any, seed: int = 0) -> Arrays:
    """Inputs of float32 whose values the element type has. Behind the last live position of each row stands NaN or Inf.

    `last_seen`: [B, S].
    """
    random = np.random.default_rng(seed)
    limits = np.array(last_seen, np.int64)
    num_rows, num_slots = limits.shape
    cache = (num_rows, form.num_kv_heads, form.capacity, form.head_dim)
    inputs = {
        "query": random.normal(0, 2, (num_rows, form.num_heads, num_slots, form.head_dim)),
        "keys": random.normal(0, 1, cache),
        "values": random.uniform(-1, 1, cache),
    }
    exact = {name: value.astype(NUMPY_TYPES[form.element_type]).astype(np.float32) for name, value in inputs.items()}
    for row, num_live in enumerate(limits.max(axis=1) + 1):
        exact["keys"][row, :, num_live:] = np.inf
        exact["values"][row, :, num_live:] = np.nan
    return {**exact, "last_seen": limits}


def causal(past_lengths: Any, num_slots: int) -> NDArray[np.int64]:
    """last_seen [B, S] of verification rows; an idle row has no past and sees its own padding."""
    limits: NDArray[np.int64] = np.asarray(past_lengths, np.int64)[:, None] + np.arange(num_slots)
    return limits


def block(past_lengths: Any, num_slots: int) -> NDArray[np.int64]:
    """last_seen [B, S] of draft blocks, in which every slot sees the whole block."""
    return np.repeat(causal(past_lengths, num_slots)[:, -1:], num_slots, axis=1)


def function_model(form: RowAttentionForm, num_layers: int = 1) -> onnx.ModelProto:
    """Layer after layer attends with what the one before made, over caches of its own."""
    tensors = {tensor.name: tensor for tensor in RowAttentionOperation(form).inputs}
    inputs, nodes, query = [_info("query", tensors["query"]), _info("last_seen", tensors["last_seen"])], [], "query"
    for layer in range(num_layers):
        suffix = f".{layer}" if layer else ""
        names = [f"{name}{suffix}" for name in ("keys", "values")]
        inputs += [_info(name, tensors["keys"]) for name in names]
        output = "attended" if layer == num_layers - 1 else f"attended.{layer}"
        nodes.append(row_attention_node(form, [query, *names, "last_seen"], [output], name=f"RowAttention.{layer}"))
        query = output
    return _model([_info("attended", tensors["query"])], inputs, nodes, form)


def cached_model(form: RowAttentionForm, num_layers: int) -> onnx.ModelProto:
    """As a target attends: each layer writes new keys and values into caches that stay where they are, and attends."""
    tensors = {tensor.name: tensor for tensor in RowAttentionOperation(form).inputs}
    new = replace(tensors["keys"], shape=("B", form.num_kv_heads, "S", form.head_dim))
    inputs = [_info(name, tensors[name]) for name in ("query", "last_seen")]
    inputs.append(_info("begin", replace(tensors["last_seen"], shape=("B",))))
    outputs, nodes, query = [], [], "query"
    for layer in range(num_layers):
        caches = [f"keys.{layer}", f"values.{layer}"]
        for name in caches:
            inputs += [_info(name, tensors["keys"]), _info(f"new.{name}", new)]
            nodes.append(helper.make_node("TensorScatter", [name, f"new.{name}", "begin"], [f"{name}.output"], axis=2))
            outputs.append(_info(f"{name}.output", tensors["keys"]))
        given = [query, *(f"{name}.output" for name in caches), "last_seen"]
        query = f"attended.{layer}"
        nodes.append(row_attention_node(form, given, [query], name=f"RowAttention.{layer}"))
    return _model([_info(query, tensors["query"]), *outputs], inputs, nodes, form)


def _model(
    outputs: list[onnx.ValueInfoProto],
    inputs: list[onnx.ValueInfoProto],
    nodes: list[onnx.NodeProto],
    form: RowAttentionForm,
) -> onnx.ModelProto:
    return helper.make_model(
        helper.make_graph(nodes, "row_attention", inputs, outputs),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(NAMESPACE, 1)],
        functions=[row_attention_function(form)],
        ir_version=11,
    )


def _info(name: str, tensor: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_TYPES[tensor.element_type], tensor.shape)
