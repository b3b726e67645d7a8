"""PageWrite: the kernel under Triton's CPU interpreter, the function body in ONNX Runtime and the reference write the
same numbers, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from dspark_trt_plugins.page_write.form import PageWriteForm
from dspark_trt_plugins.page_write.launches import PageWriteOperation
from dspark_trt_plugins.page_write.reference import page_write

from tests.support.interpreted_kernels import run_interpreted
from tests.support.row_attention_cases import NUMPY_TYPES, Arrays, write_model


def inputs(form: PageWriteForm, num_tokens: int, num_pages: int = 9) -> Arrays:
    """Slots of all pages but the last, none twice; NaN stands where nothing is written."""
    random = np.random.default_rng(num_tokens)
    width = form.num_kv_heads * form.head_dim
    kind = NUMPY_TYPES[form.element_type]
    keys, values = (random.normal(size=(num_tokens, width)).astype(kind).astype(np.float32) for _ in range(2))
    slots = random.permutation((num_pages - 1) * form.page_positions)[:num_tokens]
    pool = (num_pages, 2, form.num_kv_heads, form.page_positions, form.head_dim)
    return {"keys": keys, "values": values, "slots": slots, "pages": np.full(pool, np.nan, np.float32)}


@pytest.mark.parametrize("element_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 16), (3, 80), (8, 128), (20, 64)])
def test_the_kernel_writes_what_the_reference_writes(num_kv_heads: int, head_dim: int, element_type: Any) -> None:
    form = PageWriteForm(num_kv_heads, head_dim, 16, element_type)
    given = inputs(form, 21)
    found = run_interpreted(PageWriteOperation(form), given)["written"]
    np.testing.assert_array_equal(found.astype(np.float32), page_write(form, **given))


def test_the_body_writes_what_the_reference_writes_and_is_the_same_for_all_forms() -> None:
    models = []
    for sizes in ((2, 16), (3, 8)):
        form = PageWriteForm(*sizes, 16, "float32")
        models.append(write_model(form))
        onnx.checker.check_model(models[-1], full_check=True)
        session = onnxruntime.InferenceSession(models[-1].SerializeToString(), providers=["CPUExecutionProvider"])
        given = inputs(form, 21)
        np.testing.assert_array_equal(session.run(None, given)[0], page_write(form, **given))
    assert models[0].functions[0] == models[1].functions[0]


def test_tokens_that_share_a_slot_leave_one_of_them_and_no_tokens_need_no_launch() -> None:
    """Padding goes to page 0, however much of it there is."""
    form = PageWriteForm(1, 8, 16, "float32")
    given = inputs(form, 5) | {"slots": np.array([0, 40, 0, 0, 41])}
    found = run_interpreted(PageWriteOperation(form), given)["written"]
    assert np.isfinite(found).sum() == 3 * 2 * 8
    np.testing.assert_array_equal(found[2, :, 0, 8:10], page_write(form, **given)[2, :, 0, 8:10])
    assert PageWriteOperation(form).launches({"T": 0, "P": 9}) == ()


def test_forms_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="page_positions of 1 or more, found 2, 16 and 0"):
        PageWriteForm(2, 16, 0, "float32")
