"""The Triton kernels of PrefixSelect, under Triton's CPU interpreter, against the reference and the function body.

Every tensor stands in a larger allocation full of NaN (integers: far outside every tensor), and nothing outside may
change.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.launches import PrefixSelectOperation
from dspark_trt_plugins.prefix_select.reference import prefix_select
from onnx.inliner import inline_local_functions

from tests.support.interpreted_kernels import run_interpreted
from tests.support.prefix_select_cases import Arrays, function_model, random_step

GAMMA = 7


def run_body(form: PrefixSelectForm, inputs: Arrays) -> Arrays:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = function_model(form).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return dict(zip(form.output_names, session.run(None, inputs), strict=True))


def assert_equal(found: Arrays, expected: Arrays) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == np.int64
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("num_requests", [1, 2, 13, 64, 75])
def test_kernel_reference_and_function_body_select_and_pack_the_same(num_requests: int) -> None:
    form = PrefixSelectForm(GAMMA)
    num_admitted = 0
    for seed in range(8 if num_requests < 64 else 2):
        inputs = random_step(form, num_requests, seed)
        expected = prefix_select(form, inputs)
        assert_equal(run_interpreted(PrefixSelectOperation(form), inputs), expected)
        assert_equal(run_body(form, inputs), expected)
        num_admitted += int(expected["verify_len"].sum())
    assert num_admitted > 0


def test_one_draft_per_block_and_no_offered_draft() -> None:
    form = PrefixSelectForm(1)
    inputs = random_step(form, 5, seed=3)
    assert_equal(run_interpreted(PrefixSelectOperation(form), inputs), prefix_select(form, inputs))
    inputs["caps"][:] = 0
    found = run_interpreted(PrefixSelectOperation(form), inputs)
    assert_equal(found, prefix_select(form, inputs))
    assert_equal(run_body(form, inputs), found)
    assert found["verify_len"].tolist() == [0] * 5


def test_exactly_the_budget_is_admitted_so_that_the_host_knows_the_batch_tokens() -> None:
    """Confidences that are not finite rank last; they do not change how many drafts are admitted."""
    form = PrefixSelectForm(GAMMA)
    for seed in range(12):
        inputs = random_step(form, 9, seed)
        inputs["confidence_logits"][seed % 9] = [np.nan, np.inf, -np.inf][seed % 3]
        num_forced = int(inputs["caps"][inputs["is_forced"] > 0].sum())
        num_packed = 9 + num_forced + int(inputs["num_admitted"][0])
        inputs["token_index"] = np.arange(num_packed)
        found = run_interpreted(PrefixSelectOperation(form), inputs)
        assert found["num_tokens"].tolist() == [num_packed]
        assert_equal(found, prefix_select(form, inputs))


@pytest.mark.parametrize("budget", [2**31, 2**31 + 3, 2**40, -1, -(2**31) - 1])
def test_a_budget_beyond_32_bits_admits_all_that_is_offered_and_a_negative_one_nothing(budget: int) -> None:
    form = PrefixSelectForm(GAMMA)
    inputs = random_step(form, 5, seed=3)
    inputs["num_admitted"][:] = budget
    inputs["token_index"] = np.arange(5 + int(inputs["caps"].sum()))
    expected = np.where(inputs["is_forced"] > 0, inputs["caps"], inputs["caps"] if budget > 0 else 0)
    found = run_interpreted(PrefixSelectOperation(form), inputs)
    assert found["verify_len"].tolist() == expected.tolist()
    assert_equal(found, prefix_select(form, inputs))
    assert_equal(run_body(form, inputs), found)


@pytest.mark.parametrize("seed", range(4))
def test_padding_requests_have_no_token_and_change_nothing(seed: int) -> None:
    form, rows = PrefixSelectForm(GAMMA), ("caps", "is_forced", "anchor_ids", "past_lengths", "block_rows")
    inputs = random_step(form, 5, seed)
    expected = prefix_select(form, inputs)
    padding = {name: np.zeros_like(inputs[name][:3]) for name in (*rows, "confidence_logits", "draft_ids")}
    padding["caps"][:] = -1
    padding["is_forced"][:] = [0, 1, 0]
    padding["confidence_logits"][:] = 9
    padded = inputs | {name: np.concatenate([inputs[name], more]) for name, more in padding.items()}
    found = run_interpreted(PrefixSelectOperation(form), padded)
    assert_equal(found, prefix_select(form, padded))
    assert_equal(run_body(form, padded), found)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name][: len(value)], value, name)
    assert found["verify_len"][5:].tolist() == [0, 0, 0]
    assert found["first_tokens"][5:].tolist() == expected["num_tokens"].tolist() * 3


def test_admission_of_a_draft_does_not_change_with_later_confidences() -> None:
    random = np.random.default_rng(0)
    decisions = []
    form = PrefixSelectForm(GAMMA)
    for seed in range(24):
        inputs = random_step(form, 6, seed)
        request, draft = random.integers(6), random.integers(GAMMA - 1)
        admitted = run_interpreted(PrefixSelectOperation(form), inputs)["verify_len"][request] > draft
        inputs["confidence_logits"][request, draft + 1 :] = random.normal(0, 4, GAMMA - draft - 1)
        changed = run_interpreted(PrefixSelectOperation(form), inputs)["verify_len"][request] > draft
        assert admitted == changed
        decisions.append(admitted)
    assert 0.2 < np.mean(decisions) < 0.8  # both outcomes were met


def test_packed_tensors_of_a_small_step() -> None:
    """Three requests in rows 2, 0 and 3; row 1 is free. Two tokens of padding."""
    form = PrefixSelectForm(2)
    inputs = {
        "confidence_logits": np.array([[2, 2], [-1, 0], [3, 3]], np.float32),
        "temperatures": np.ones(2, np.float32),
        "caps": np.array([2, 2, 1]),
        "is_forced": np.zeros(3, np.int64),
        "anchor_ids": np.array([10, 20, 30]),
        "draft_ids": np.array([[11, 12], [21, 22], [31, 32]]),
        "past_lengths": np.array([100, 200, 300]),
        "block_rows": np.array([2, 0, 3]),
        "row_requests": np.array([1, 99, 0, 2]),
        "row_query_lengths": np.array([1, 0, 1, 1]),
        "token_index": np.arange(8),
        "num_admitted": np.array([3]),
    }
    expected = {
        "verify_len": [2, 0, 1],
        "num_tokens": [6],
        "first_tokens": [0, 3, 4],
        "token_requests": [0, 0, 0, 1, 2, 2, 2, 2],
        "token_ids": [10, 11, 12, 20, 30, 31, 31, 31],
        "positions": [100, 101, 102, 200, 300, 301, 301, 301],
        "padded_indices": [6, 7, 8, 0, 9, 10, 10, 10],
        "decode.tokens": [[3, 3, 3], [0, 0, 0], [0, 1, 2], [4, 5, 5]],
        "decode.past_lengths": [200, 0, 100, 300],
        "decode.query_lengths": [1, 0, 3, 2],
    }
    found = run_interpreted(PrefixSelectOperation(form), inputs)
    assert {name: value.tolist() for name, value in found.items()} == expected
    assert_equal(prefix_select(form, inputs), found)


def test_the_model_passes_the_checker_and_the_body_can_be_inlined() -> None:
    form = PrefixSelectForm(GAMMA)
    model = function_model(form)
    onnx.checker.check_model(model, full_check=True)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in model.graph.node[0].attribute}
    assert attributes["plugin_namespace"] == b"dspark"
    assert attributes["plugin_version"] == b"1"
    assert attributes["gamma"] == GAMMA
    inlined = inline_local_functions(model)
    assert {node.domain for node in inlined.graph.node} == {""}
