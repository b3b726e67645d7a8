"""The memory plan of shapes that a test does not compile, and tensors that TensorRT could not count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dspark_trt.contract import bindings
from dspark_trt.contract.page_plan import MOST_ELEMENTS
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.tensorrt.compiler.graphs import OpenedGraphs, open_graphs
from dspark_trt.engines.tensorrt.compiler.profiles import ExtentRange, graph_inputs, graph_profiles
from dspark_trt.engines.tensorrt.compiler.scratch import check_elements, scratch_bytes
from dspark_trt.errors import EngineBuildError
from tests.support.factories import write_drafter, write_target
from tests.support.rtx_graphs import export


def opened(folder: Path, limits: EngineLimits) -> OpenedGraphs:
    """Heads as Llama-3.1-8B has them, of a narrow model."""
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 1, "hidden": 64, "max_positions": 131072}
    target = write_target(folder / "target", **heads)
    return open_graphs(
        export(target, write_drafter(folder / "drafter", target, taps=(0,)), folder / "g", limits, "bf16").graphs
    )


def test_prompt_chunks_are_not_planned_for_all_rows_at_their_longest(tmp_path: Path) -> None:
    """256 rows of 2048 tokens each would be 4.3 GB of queries, and as much of answers."""
    limits = EngineLimits(max_requests=256, max_seq_len=4096, max_batch_tokens=2048)
    graphs = opened(tmp_path, limits)
    profiles = graph_profiles(bindings.TARGET_GRAPH, graphs.target, graphs.drafter)
    sizes = {each.name: scratch_bytes(graphs.models[bindings.TARGET_GRAPH], graphs.target, each) for each in profiles}
    assert max(sizes.values()) < 500e6
    assert [name for name in sizes if name.startswith("prefill")] == ["prefill"]
    for graph, model in graphs.models.items():
        dims = graphs.target if graph == bindings.TARGET_GRAPH else graphs.drafter
        for profile in graph_profiles(graph, graphs.target, graphs.drafter):
            check_elements(graph, graph_inputs(graph, graphs.target, graphs.drafter), model, dims, profile)


def test_a_tensor_that_tensorrt_could_not_count_is_refused(tmp_path: Path) -> None:
    limits = EngineLimits(max_requests=256, max_seq_len=16384, max_batch_tokens=512)
    graphs = opened(tmp_path, limits)
    pages = ExtentRange(2, 2, MOST_ELEMENTS)
    profile = graph_profiles(bindings.TARGET_GRAPH, graphs.target, graphs.drafter)[0]
    profile = replace(profile, extents={**profile.extents, "P": pages})
    inputs = graph_inputs(bindings.TARGET_GRAPH, graphs.target, graphs.drafter)
    with pytest.raises(
        EngineBuildError,
        match=rf"profile decode: kv_cache\.0: expected {MOST_ELEMENTS} elements .* lower --max-batch-tokens",
    ):
        check_elements(bindings.TARGET_GRAPH, inputs, graphs.models[bindings.TARGET_GRAPH], graphs.target, profile)
