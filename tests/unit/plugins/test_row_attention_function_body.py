"""The function body of RowAttention: ONNX Runtime computes what the reference says,
and one function serves all layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from dspark_trt_plugins.registry import operations_in
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation
from dspark_trt_plugins.row_attention.reference import row_attention
from onnx.inliner import inline_local_functions

from tests.support.row_attention_cases import NUMPY_TYPES, TOLERANCE, block, causal, function_model, random_rows

FORM = RowAttentionForm(8, 2, 64, 4608, 8, "bfloat16")


@pytest.mark.parametrize("element_type", ["float32", "float16"])  # ONNX Runtime has no Attention of bfloat16 on CPUs
@pytest.mark.parametrize("heads", [(8, 2), (9, 3), (4, 4)])
@pytest.mark.parametrize("limits", [causal([70, 0, 294], 6), block([70, 0, 294], 6), causal([299], 1)])
def test_reference_and_function_body_attend_the_same(
    limits: np.ndarray[Any, Any], heads: tuple[int, int], element_type: Any
) -> None:
    form = RowAttentionForm(*heads, 32, 300, 6, element_type)
    inputs = random_rows(form, limits)
    expected = row_attention(form, **inputs)
    given = {name: np.nan_to_num(value, nan=0, posinf=0) for name, value in inputs.items()}  # 0 * NaN gets through it
    given = {
        name: value if name == "last_seen" else value.astype(NUMPY_TYPES[element_type]) for name, value in given.items()
    }
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        function_model(form).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, given)
    tolerance = 4 * TOLERANCE[element_type]  # ONNX Runtime rounds in between where the kernels do not
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=tolerance)


def test_the_reference_is_a_softmax_over_what_a_query_sees() -> None:
    """One head, two keys: scores 0 and ln 3, so weights 1/4 and 3/4; a third position is not live."""
    form = RowAttentionForm(1, 1, 1, 3, 2, "float32")
    keys, values = np.array([0, np.log(3), np.nan]), np.array([1.0, 5.0, np.nan])
    found = row_attention(
        form,
        query=np.ones((1, 1, 2, 1)),
        keys=keys.reshape(1, 1, 3, 1),
        values=values.reshape(1, 1, 3, 1),
        last_seen=np.array([[0, 1]]),
    )
    np.testing.assert_allclose(found.ravel(), [1, 4])


def test_the_model_passes_the_checker_and_the_body_is_todays_attention() -> None:
    model = function_model(FORM, num_layers=3)
    onnx.checker.check_model(model, full_check=True)
    inlined = inline_local_functions(model)
    assert {node.domain for node in inlined.graph.node} == {""}
    per_layer = ["Constant"] * 2 + ["Unsqueeze", "LessOrEqual", "Attention"]
    assert [node.op_type for node in inlined.graph.node] == 3 * per_layer


def test_layers_of_one_form_are_one_operation() -> None:
    model = function_model(FORM, num_layers=3)
    assert operations_in(model) == [RowAttentionOperation(FORM)]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in model.graph.node[0].attribute}
    assert attributes["plugin_namespace"] == b"dspark"
    assert attributes["plugin_version"] == b"1"
    assert (attributes["capacity"], attributes["element_type"]) == (4608, b"bfloat16")
