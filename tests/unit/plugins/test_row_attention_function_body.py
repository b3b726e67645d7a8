"""The function body of RowAttention: ONNX Runtime computes what the reference says,
and one function serves all layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from dspark_trt_plugins.page_write.launches import PageWriteOperation
from dspark_trt_plugins.registry import operations_in
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation
from dspark_trt_plugins.row_attention.reference import row_attention
from onnx.inliner import inline_local_functions

from tests.support.row_attention_cases import (
    NUMPY_TYPES,
    TOLERANCE,
    Rows,
    attention_form,
    attention_model,
    paged_model,
    random_call,
    without_poison,
)

FORM = attention_form(8, 2, 64, 4608, 8, "bfloat16", num_chunk_slots=512)
CASES = {
    "verified": (Rows([70, 0, 290], [6, 0, 2], 6), None),
    "drafted": (Rows.alike([70, 0, 290], 6), None),
    "one token": (Rows.alike([299], 1), None),
    "with chunks": (Rows([70, 290], [2, 1], 6), Rows([0, 100], [40, 3], 40)),
    "chunks alone": (Rows([0], [0], 1), Rows([0, 100, 7], [1, 30, 2], 30)),
}


@pytest.mark.parametrize("element_type", ["float32", "float16"])  # ONNX Runtime has no Attention of bfloat16 on CPUs
@pytest.mark.parametrize("heads", [(8, 2), (9, 3), (4, 4)])
@pytest.mark.parametrize("case", CASES)
def test_reference_and_function_body_attend_the_same(case: str, heads: tuple[int, int], element_type: Any) -> None:
    rows, chunks = CASES[case]
    form = attention_form(
        *heads, 32, 300, 6, element_type, num_chunk_slots=0 if chunks is None else 40, is_causal=case != "drafted"
    )
    inputs = random_call(form, rows, chunks, num_padding=3)
    expected = row_attention(form, **inputs)
    given = without_poison(inputs)
    kinds = dict.fromkeys(("query", "pages"), NUMPY_TYPES[element_type])
    given = {name: value.astype(kinds.get(name, value.dtype)) for name, value in given.items()}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        attention_model(form).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, given)
    tolerance = 4 * TOLERANCE[element_type]  # ONNX Runtime rounds in between where the kernels do not
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=tolerance)


def test_the_reference_is_a_softmax_over_what_a_query_sees() -> None:
    """One head, two keys: scores 0 and ln 3, so weights 1/4 and 3/4; a third position is not live, page 0 nobody's."""
    form = RowAttentionForm(1, 1, 1, 16, 1, 2, 0, True, "float32")
    pages = np.full((2, 2, 1, 16, 1), np.nan)
    pages[1, 0, 0, :2, 0], pages[1, 1, 0, :2, 0] = [0, np.log(3)], [1, 5]
    call: dict[str, Any] = {"first_tokens": [0], "past_lengths": [0], "query_lengths": [2], "block_tables": [[1]]}
    call = {name: np.array(value) for name, value in call.items()}
    found = row_attention(form, query=np.ones((2, 1)), pages=pages, **call)
    np.testing.assert_allclose(found.ravel(), [1, 4])
    call["query_lengths"] = np.array([0])
    assert not row_attention(form, query=np.ones((2, 1)), pages=pages, **call).any()


def test_the_model_passes_the_checker_and_the_body_has_one_attention_a_layer() -> None:
    model = paged_model(FORM, num_layers=3)
    onnx.checker.check_model(model, full_check=True)
    inlined = inline_local_functions(model)
    assert {node.domain for node in inlined.graph.node} == {""}
    types = [node.op_type for node in inlined.graph.node]
    assert (types.count("Attention"), types.count("ScatterND")) == (3, 2 * 3)


def test_layers_of_one_form_are_one_operation() -> None:
    model = paged_model(FORM, num_layers=3)
    write, attend = operations_in(model)
    assert isinstance(write, PageWriteOperation)
    assert attend == RowAttentionOperation(FORM)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in model.graph.node[1].attribute}
    assert attributes["plugin_namespace"] == b"dspark"
    assert attributes["plugin_version"] == b"1"
    assert (attributes["table_width"], attributes["element_type"]) == (72, b"bfloat16")
