"""The memory plan of shapes that a test does not compile, and tensors that TensorRT could not count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.contract import bindings
from dspark_trt.contract.page_plan import MOST_ELEMENTS, row_bytes
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.tensorrt.compiler.graphs import OpenedGraphs, open_graphs
from dspark_trt.engines.tensorrt.compiler.memory import memory_plan
from dspark_trt.engines.tensorrt.compiler.profiles import ExtentRange, graph_inputs, graph_profiles
from dspark_trt.engines.tensorrt.compiler.scratch import check_elements, scratch_bytes
from dspark_trt.errors import EngineBuildError
from tests.support.eagle3_dialects import write_eagle3
from tests.support.factories import write_drafter, write_target
from tests.support.medusa_forms import random_heads, write_medusa
from tests.support.rtx_graphs import export
from tests.support.transformers_targets import NO_KEYS_OF_A_DRAFTER, write_by_transformers


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


def test_masks_over_whole_rows_and_experts_are_planned(tmp_path: Path) -> None:
    """TensorRT-RTX 1.7.1 said 126 MB of a prompt chunk of that window, and 67 MB of 64 experts in 256 tokens."""
    limits = EngineLimits(max_requests=16, max_seq_len=4032, max_batch_tokens=256)
    sizes: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 1, "head_dim": 64, "num_attention_heads": 16}
    window: dict[str, Any] = {"num_key_value_heads": 4, "sliding_window": 512}
    experts: dict[str, Any] = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    for family, keys, least in (("mistral", window, 126e6), ("qwen3_moe", experts, 67e6)):
        target = write_by_transformers(tmp_path / family, family, max_position_embeddings=4096, **sizes, **keys)
        drafter = write_drafter(
            tmp_path / f"{family} drafter", target, layers=1, taps=(0,), config_extra=NO_KEYS_OF_A_DRAFTER
        )
        graphs = open_graphs(export(target, drafter, tmp_path / f"{family} graphs", limits, "bf16").graphs)
        model = graphs.models[bindings.TARGET_GRAPH]
        planned = max(scratch_bytes(model, graphs.target, each) for each in graphs.profiles(bindings.TARGET_GRAPH))
        assert least < planned < 4 * least


def test_every_graph_of_every_family_of_drafters_is_planned(tmp_path: Path) -> None:
    """The passes of a language model have draws and no requests; Medusa has no rows."""
    limits = EngineLimits(max_requests=4, max_seq_len=64, max_batch_tokens=32)
    target = write_target(tmp_path / "target", layers=3)
    small: dict[str, Any] = {"layers": 1, "hidden": 32}
    drafters = {
        "model": write_target(tmp_path / "model", **small),
        "PARD": write_target(tmp_path / "PARD", config_extra={"pard_token": 90}, **small),
        "eagle3": write_eagle3(tmp_path / "eagle3", target, "deepspec", layer_ids=(0, 1)),
        "medusa": write_medusa(tmp_path / "medusa", random_heads(target, num_heads=2)),
    }
    for family, drafter in drafters.items():
        graphs = open_graphs(export(target, drafter, tmp_path / f"{family} graphs", limits, "bf16").graphs)
        for graph, model in graphs.models.items():
            dims = graphs.target if graph == bindings.TARGET_GRAPH else graphs.drafter
            for profile in graphs.profiles(graph):
                check_elements(graph, graph_inputs(graph, graphs.target, graphs.drafter), model, dims, profile)
                assert scratch_bytes(model, dims, profile) > 0
        assert memory_plan({}, graphs.target, graphs.drafter, scratch=0)["outputs"] > 0
        assert row_bytes(graphs.drafter) == 2 * graphs.drafter.cache.num_elements
        assert (graphs.drafter.cache.num_elements == 0) == (family == "medusa")


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
