"""Random PrefixSelect inputs, and the function body run by ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from dspark_trt_plugins.body import OPSET
from dspark_trt_plugins.operation import NAMESPACE
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.function_body import prefix_select_function, prefix_select_node
from dspark_trt_plugins.prefix_select.launches import PrefixSelectOperation
from numpy.typing import NDArray
from onnx import TensorProto, helper

Arrays = dict[str, NDArray[Any]]


def random_step(form: PrefixSelectForm, num_requests: int, seed: int, num_padding: int = 5) -> Arrays:
    """A step in which requests live in some of the rows, in any order; some have no room, some are forced."""
    random = np.random.default_rng(seed)
    num_rows = num_requests + int(random.integers(0, 4))
    block_rows = random.permutation(num_rows)[:num_requests]
    row_requests = np.full(num_rows, 2**40)  # any number in a row without request
    row_requests[block_rows] = np.arange(num_requests)
    row_query_lengths = np.zeros(num_rows, np.int64)
    row_query_lengths[block_rows] = 1
    block = (num_requests, form.gamma)
    # few distinct values, so that equal survivals are met often
    logits = random.choice([-2.0, -0.5, 0.0, 1.0, 3.0], block).astype(np.float32)
    logits[random.random(block) < 0.03] = random.choice([np.nan, np.inf, -np.inf])
    caps = random.integers(0, form.gamma + 1, num_requests)
    is_forced = random.random(num_requests) < 0.2
    num_offered = int(np.where(is_forced, 0, caps).sum())
    return {
        "confidence_logits": logits,
        "temperatures": random.uniform(0.5, 2, form.gamma).astype(np.float32),
        "caps": caps,
        "is_forced": is_forced.astype(np.int64),
        "anchor_ids": random.integers(0, 10**6, num_requests),
        "draft_ids": random.integers(0, 10**6, block),
        "past_lengths": random.integers(0, 10**5, num_requests),
        "block_rows": block_rows,
        "row_requests": row_requests,
        "row_query_lengths": row_query_lengths,
        "token_index": np.arange(num_requests + int(caps.sum()) + num_padding),
        "num_admitted": np.array([random.integers(0, num_offered + 1)]),
    }


def function_model(form: PrefixSelectForm) -> onnx.ModelProto:
    """A model of one PrefixSelect node."""
    operation = PrefixSelectOperation(form)
    types = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
    inputs, outputs = (
        [helper.make_tensor_value_info(t.name, types[t.element_type], t.shape) for t in tensors]
        for tensors in (operation.inputs, operation.outputs)
    )
    node = prefix_select_node(form, form.input_names, form.output_names)
    return helper.make_model(
        helper.make_graph([node], "prefix_select", inputs, outputs),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(NAMESPACE, 1)],
        functions=[prefix_select_function(form)],
        ir_version=11,
    )
