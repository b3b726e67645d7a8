"""A small graph with both plugin nodes, as a drafter ends: lm_head -> MarkovHead -> PrefixSelect."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from dspark_trt_plugins.body import OPSET
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.markov_head.function_body import markov_head_function, markov_head_node
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.operation import NAMESPACE, Tensor
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.function_body import prefix_select_function, prefix_select_node
from dspark_trt_plugins.prefix_select.launches import PrefixSelectOperation
from onnx import TensorProto, helper, numpy_helper

from tests.support.markov_head_cases import random_weights

ONNX_TYPES = {
    "int64": TensorProto.INT64,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float32": TensorProto.FLOAT,
}
NUMPY_TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
MAKES = ("base_logits", "draft_ids", "confidence_logits")  # inputs of a node that the graph computes


def draft_and_select_model(head: MarkovHeadForm, select: PrefixSelectForm) -> onnx.ModelProto:
    """Inputs are those of both operations that nothing in the graph makes; outputs are all outputs of both."""
    head_operation, select_operation = MarkovHeadOperation(head), PrefixSelectOperation(select)
    weight_type = NUMPY_TYPES[head.weight_type]
    weights = random_weights(head, head.hidden_size)
    weights["lm_head"] = np.random.default_rng(0).normal(0, 0.1, (head.hidden_size, head.vocab_size))
    initializers = [numpy_helper.from_array(value.astype(weight_type), name) for name, value in weights.items()]
    # the other operation's tensor of the same name and shape letter is the same tensor
    inputs = {t.name: t for t in (*head_operation.inputs, *select_operation.inputs)}
    inputs["draft_temperatures"] = Tensor("draft_temperatures", "float32", ("R",))
    outputs = {t.name: t for t in (*head_operation.outputs, *select_operation.outputs)}
    head_inputs = ["draft_temperatures" if name == "temperatures" else name for name in head.input_names]
    logits = helper.make_node("MatMul", ["hidden", "lm_head"], ["logits"])
    cast = helper.make_node("Cast", ["logits"], ["base_logits"], to=ONNX_TYPES[head.logits_type])
    nodes = [
        logits,
        cast,
        markov_head_node(head, head_inputs, head.output_names),
        prefix_select_node(select, select.input_names, select.output_names),
    ]
    given = [t for name, t in inputs.items() if name not in (*weights, *MAKES)]
    return helper.make_model(
        helper.make_graph(nodes, "draft_and_select", _infos(given), _infos(list(outputs.values())), initializers),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(NAMESPACE, 1)],
        functions=[markov_head_function(head), prefix_select_function(select)],
        ir_version=11,
    )


def _infos(tensors: list[Tensor]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(t.name, ONNX_TYPES[t.element_type], t.shape) for t in tensors]
