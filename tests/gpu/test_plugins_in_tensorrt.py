"""An engine with MarkovHead and PrefixSelect, built and run by TensorRT on this GPU, against the references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.reference import prefix_select
from dspark_trt_plugins.registry import operations_in, register_plugins, unregister_plugins
from dspark_trt_plugins.trt_plugin import load_tensorrt
from onnx import numpy_helper

from tests.gpu.cases import Arrays, assert_drafts_are_right, rounded
from tests.gpu.conftest import Compiler
from tests.support.markov_head_cases import random_inputs
from tests.support.plugin_graphs import draft_and_select_model
from tests.support.prefix_select_cases import random_step

pytestmark = pytest.mark.gpu
NUM_REQUESTS = 6
HEAD = MarkovHeadForm(3, 4099, 64, "vanilla", hidden_size=64, weight_type="float16")
SELECT = PrefixSelectForm(3)


def build_and_run(trt: Any, model: Any, arrays: Arrays) -> Arrays:
    """All outputs of an engine built for exactly these shapes."""
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # always on from TensorRT 11 on
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for value in model.graph.input:
        profile.set_shape(value.name, *[arrays[value.name].shape] * 3)
    config.add_optimization_profile(profile)
    serialized = builder.build_serialized_network(network, config)
    assert serialized is not None
    engine = trt.Runtime(logger).deserialize_cuda_engine(serialized)
    context = engine.create_execution_context()
    tensors = {}
    for value in model.graph.input:
        tensors[value.name] = torch.from_numpy(np.ascontiguousarray(arrays[value.name])).cuda()
        context.set_input_shape(value.name, arrays[value.name].shape)
    types = {trt.int64: torch.int64, trt.float32: torch.float32}
    for value in model.graph.output:
        shape = tuple(context.get_tensor_shape(value.name))
        tensors[value.name] = torch.empty(shape, dtype=types[engine.get_tensor_dtype(value.name)], device="cuda")
    for name, tensor in tensors.items():
        context.set_tensor_address(name, tensor.data_ptr())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    assert context.execute_async_v3(stream.cuda_stream)
    stream.synchronize()
    return {value.name: tensors[value.name].cpu().numpy() for value in model.graph.output}


@pytest.mark.parametrize("with_plugins", [True, False])
def test_an_engine_drafts_and_selects_as_the_references_do(
    with_plugins: bool, compile_for_gpu: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = load_tensorrt()
    model = draft_and_select_model(HEAD, SELECT)
    drafting = random_inputs(HEAD, 64, [0.0, 0.7, 1.0, 0.0, 1e-2, 3.0])
    step = random_step(SELECT, NUM_REQUESTS, seed=5)
    arrays = {
        **drafting,
        **step,
        "draft_temperatures": drafting["temperatures"],
        "anchor_ids": drafting["anchor_ids"] % 4099,
    }
    arrays["hidden"] = drafting["hidden"].astype(np.float16)
    if with_plugins:
        register_plugins(trt, [compile_for_gpu(operation) for operation in operations_in(model)])
    try:
        found = build_and_run(trt, model, arrays)
    finally:
        if with_plugins:
            unregister_plugins(trt)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    drafting["base_logits"] = arrays["hidden"].astype(np.float64) @ weights.pop("lm_head").astype(np.float64)
    operation = MarkovHeadOperation(HEAD)
    # lm_head rounds its logits to float16
    assert_drafts_are_right(
        HEAD, rounded(operation, weights), rounded(operation, drafting), found, monkeypatch, tolerance=2e-2
    )
    step |= {name: found[name] for name in ("draft_ids", "confidence_logits")}
    step["anchor_ids"] = arrays["anchor_ids"]
    for name, expected in prefix_select(SELECT, step).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
