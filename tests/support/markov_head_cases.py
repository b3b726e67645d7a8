"""Random MarkovHead inputs, and the function body run by ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from dspark_trt_plugins.body import OPSET
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.markov_head.function_body import markov_head_function, markov_head_node
from dspark_trt_plugins.markov_head.reference import MarkovHeadOutput
from dspark_trt_plugins.operation import NAMESPACE
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, NDArray[Any]]


def random_weights(form: MarkovHeadForm, hidden_size: int, seed: int = 0) -> Arrays:
    rank = form.markov_rank
    confidence_width = hidden_size + (rank if form.is_confidence_with_markov else 0)
    shapes = {
        "markov_head.markov_w1.weight": (form.vocab_size, rank),
        "markov_head.markov_w2.weight": (form.vocab_size, rank),
        "markov_head.gate_proj.weight": (rank, hidden_size + rank),
        "markov_head.gate_proj.bias": (rank,),
        "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden_size),
        "markov_head.joint_proj.bias": (3 * rank,),
        "confidence_head.proj.weight": (1, confidence_width),
        "confidence_head.proj.bias": (1,),
    }
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 0.4, shapes[name]).astype(np.float32) for name in form.weight_names}


def random_inputs(
    form: MarkovHeadForm, hidden_size: int, temperatures: list[float], seed: int = 0, spread: float = 2.0
) -> Arrays:
    random = np.random.default_rng(seed)
    num_requests = len(temperatures)
    block = (num_requests, form.gamma)
    return {
        "base_logits": random.normal(0, spread, (*block, form.vocab_size)).astype(np.float32),
        "hidden": random.normal(0, 1, (*block, hidden_size)).astype(np.float32),
        "anchor_ids": random.integers(0, form.vocab_size, num_requests),
        "temperatures": np.array(temperatures, np.float32),
        "uniforms": random.random(block, dtype=np.float32),
    }


def function_model(form: MarkovHeadForm, weights: Arrays, hidden_size: int) -> onnx.ModelProto:
    """A model of one MarkovHead node whose weights are initializers."""
    value = helper.make_tensor_value_info
    block = ["R", form.gamma]
    inputs = [
        value("base_logits", TensorProto.FLOAT, [*block, form.vocab_size]),
        value("hidden", TensorProto.FLOAT, [*block, hidden_size]),
        value("anchor_ids", TensorProto.INT64, ["R"]),
        value("temperatures", TensorProto.FLOAT, ["R"]),
        value("uniforms", TensorProto.FLOAT, block),
    ]
    outputs = [
        value("draft_ids", TensorProto.INT64, block),
        value("draft_logits", TensorProto.FLOAT, [*block, form.vocab_size]),
        value("confidence_logits", TensorProto.FLOAT, block),
    ][: len(form.output_names)]
    node = markov_head_node(form, form.input_names, form.output_names)
    initializers = [numpy_helper.from_array(weights[name], name) for name in form.weight_names]
    return helper.make_model(
        helper.make_graph([node], "markov_head", inputs, outputs, initializers),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(NAMESPACE, 1)],
        functions=[markov_head_function(form)],
        ir_version=11,
    )


def run_function(form: MarkovHeadForm, weights: Arrays, inputs: Arrays) -> MarkovHeadOutput:
    model = function_model(form, weights, inputs["hidden"].shape[2])
    draft_ids, draft_logits, *confidence = run_model(model, inputs)
    return MarkovHeadOutput(draft_ids, draft_logits, confidence[0] if confidence else None)


def run_model(model: onnx.ModelProto, inputs: Arrays) -> list[NDArray[Any]]:
    import onnxruntime  # not on every GPU host, nor is SciPy

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs: list[NDArray[Any]] = session.run(None, inputs)
    return outputs


def assert_draws_follow(ids: NDArray[np.int64], logits: NDArray[Any], temperature: float) -> None:
    """χ² of drawn ids [n] against softmax(logits / temperature); a correct sampler fails with probability 1e-6."""
    from scipy import stats

    tempered = logits.astype(np.float64) / temperature
    expected = np.exp(tempered - tempered.max())
    expected *= len(ids) / expected.sum()
    observed = np.bincount(ids, minlength=len(expected)).astype(np.float64)
    is_rare = expected < 10  # pooled, as the χ² approximation asks for
    if is_rare.any():
        expected = np.append(expected[~is_rare], expected[is_rare].sum())
        observed = np.append(observed[~is_rare], observed[is_rare].sum())
    assert stats.chisquare(observed, expected).pvalue > 1e-6
