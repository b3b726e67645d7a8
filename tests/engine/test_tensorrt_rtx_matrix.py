"""TensorRT-RTX compiles every graph ahead of time, on a machine without a GPU; one pair for four architectures at once.

What is shown: parsing without a warning, layer types, types and shapes, code for every architecture in the engine. What
is not: that an engine runs, for which RTX wants a driver.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from dspark_trt.contract import bindings
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.tensorrt.compiler.profiles import GRAPHS
from tests.engine.test_mtp import write_mimo
from tests.support.drafter_dialects import DRAFT_IDS, write_dialect
from tests.support.eagle3_dialects import write_eagle3
from tests.support.factories import write_drafter, write_target
from tests.support.gemma4 import write_gemma_drafter, write_gemma_eagle3, write_gemma_target
from tests.support.medusa_forms import random_heads, write_vllm_medusa
from tests.support.rtx_graphs import SMS, Pair, check_compiled, compile_pair, counted_layers, export, write_large_pair
from tests.support.transformers_targets import NO_KEYS_OF_A_DRAFTER, write_by_transformers

TWO_DRAFTS = {"speculators_config": {"proposal_methods": [{"speculative_tokens": 2}]}}
DRAFTER_GRAPHS = (bindings.INGEST_GRAPH, bindings.DRAFT_GRAPH, bindings.SELECT_GRAPH)


@dataclass(frozen=True)
class Tiny:
    """One form of head, with a family and a precision."""

    head: dict[str, Any]
    family: Literal["llama", "qwen3"]
    precision: Precision

    def __str__(self) -> str:
        return "-".join([*map(str, self.head.values()), self.family, self.precision])


TINY = (
    Tiny({"head_type": "vanilla"}, "llama", "bf16"),
    Tiny({"head_type": "gated", "embed_head": "different"}, "qwen3", "fp16"),
    Tiny({"head_type": "rnn", "confidence_bias": False}, "llama", "fp16"),
    Tiny({"head_type": "vanilla", "confidence": False}, "qwen3", "bf16"),
    Tiny({"markov_rank": 0}, "llama", "bf16"),
    Tiny({"markov_rank": 0, "confidence": False}, "qwen3", "fp16"),
)


@pytest.fixture(scope="module", params=TINY, ids=str)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder, case = tmp_path_factory.mktemp("tiny"), request.param
    target = write_target(folder / "target", family=case.family, layers=3, hidden=64, tied=case.family == "qwen3")
    drafter = write_drafter(folder / "drafter", target, layers=2, **case.head)
    return export(target, drafter, folder / "graphs", EngineLimits(3, 48, 16), case.precision)


def test_one_engine_holds_code_for_four_architectures(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", layers=3, hidden=64)
    drafter = write_drafter(tmp_path / "drafter", target, layers=2)
    pair = export(target, drafter, tmp_path / "graphs", EngineLimits(3, 48, 16), "bf16")
    facts = compile_pair(pair, tmp_path / "engines", use_plugins=True, sms=SMS)
    check_compiled(facts, pair, tmp_path / "engines", use_plugins=True)


@pytest.mark.parametrize("use_plugins", [True, False], ids=["plugins", "bodies"])
def test_every_head_compiles(tiny: Pair, use_plugins: bool, tmp_path: Path) -> None:
    facts = compile_pair(tiny, tmp_path / "engines", use_plugins=use_plugins)
    check_compiled(facts, tiny, tmp_path / "engines", use_plugins=use_plugins)


def test_a_mask_first_block_with_a_window_and_fewer_ids_compiles(tmp_path: Path) -> None:
    """The window has no kernel: its layer is TensorRT's own attention, the other one the plugin's."""
    target = write_target(tmp_path / "target", family="qwen3", layers=3, hidden=64, tied=True)
    drafter = write_dialect(
        tmp_path / "drafter",
        target,
        "speculators",
        layers=2,
        layer_ids=(1, 3),
        draft_ids=DRAFT_IDS,
        sliding=(("full_attention", "sliding_attention"), 8),
        extra={"sample_from_anchor": None, "speculators_config": None},
    )
    pair = export(target, drafter, tmp_path / "graphs", EngineLimits(3, 48, 16), "fp16")
    facts = compile_pair(pair, tmp_path / "engines", use_plugins=True, names=[bindings.DRAFT_GRAPH])
    counts = {"ATTENTION_INPUT": 1, "ATTENTION_OUTPUT": 1, "PLUGIN_V3": 4, "ROTARY_EMBEDDING": 2}
    assert counted_layers(facts) == {bindings.DRAFT_GRAPH: counts}
    assert facts[bindings.DRAFT_GRAPH].warnings == ()


def test_a_block_with_attention_sinks_compiles(tmp_path: Path) -> None:
    """No attention of TensorRT has sinks: these layers are products of matrices."""
    target = write_target(tmp_path / "target", family="qwen3", layers=3, hidden=64, tied=True)
    drafter = write_dialect(tmp_path / "drafter", target, "nemotron", layers=2, layer_ids=(0, 1), block_size=8)
    pair = export(target, drafter, tmp_path / "graphs", EngineLimits(3, 48, 16), "fp16")
    facts = compile_pair(pair, tmp_path / "engines", use_plugins=True, names=[bindings.DRAFT_GRAPH], sms=(89,))
    counts = {"PLUGIN_V3": 3, "ROTARY_EMBEDDING": 2}
    assert counted_layers(facts) == {bindings.DRAFT_GRAPH: counts}
    assert facts[bindings.DRAFT_GRAPH].warnings == ()


def test_a_target_with_experts_and_windows_compiles(tmp_path: Path) -> None:
    """An MLP in layer 0, experts in their plain form above, and no layer sees farther than its window."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16, "moe_intermediate_size": 32}
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
    target = write_by_transformers(tmp_path / "target", "qwen3_moe", **sizes, **experts, **windows)
    drafter = write_drafter(tmp_path / "drafter", target, layers=1, config_extra=NO_KEYS_OF_A_DRAFTER)
    pair = export(target, drafter, tmp_path / "graphs", EngineLimits(3, 48, 16), "fp16")
    facts = compile_pair(pair, tmp_path / "engines", use_plugins=True, names=[bindings.TARGET_GRAPH])
    counts = {"ATTENTION_INPUT": 6, "ATTENTION_OUTPUT": 6, "PLUGIN_V3": 3, "ROTARY_EMBEDDING": 3}
    assert counted_layers(facts) == {bindings.TARGET_GRAPH: counts}
    assert facts[bindings.TARGET_GRAPH].warnings == ()


def test_gemma4_with_the_heads_of_its_12b_model_compiles(tmp_path: Path) -> None:
    """Heads of 256 are TensorRT's own attention; those of 512, which it has no kernel for, are products of matrices."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "sliding_window": 8}
    heads: dict[str, Any] = {"head_dim": 256, "num_key_value_heads": 2, "global_head_dim": 512}
    types = ["sliding_attention", "full_attention"]
    target = write_gemma_target(tmp_path / "target", layer_types=types, **sizes, **heads)
    drafter = write_gemma_drafter(tmp_path / "drafter", target, taps=(0,), layers=1)
    pair = export(target, drafter, tmp_path / "graphs", EngineLimits(3, 48, 16), "bf16")
    facts = compile_pair(pair, tmp_path / "engines", use_plugins=True, names=[bindings.TARGET_GRAPH])
    counts = {"ATTENTION_INPUT": 2, "ATTENTION_OUTPUT": 2, "PLUGIN_V3": 2, "ROTARY_EMBEDDING": 2}
    assert counted_layers(facts) == {bindings.TARGET_GRAPH: counts}
    assert facts[bindings.TARGET_GRAPH].warnings == ()
    assert facts[bindings.TARGET_GRAPH].layers["SOFTMAX"] == len(bindings.TARGET_GROUPS)


FAMILIES: dict[str, tuple[dict[str, Any], str]] = {  # keys of a configuration, and what attends in a layer
    "qwen2": ({}, "PLUGIN_V3"),
    "mistral": ({"sliding_window": 8}, "ATTENTION_INPUT"),
    "qwen2_moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "PLUGIN_V3"),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, "PLUGIN_V3"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_of_every_family_compiles(family: str, tmp_path: Path) -> None:
    keys, attention = FAMILIES[family]
    keys = keys | {"hidden_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    target = write_by_transformers(tmp_path / "target", family, **keys)
    drafter = write_drafter(tmp_path / "drafter", target, layers=1, taps=(0,), config_extra=NO_KEYS_OF_A_DRAFTER)
    pair = export(target, drafter, tmp_path / "graphs", EngineLimits(3, 48, 16), "bf16")
    graph, groups = bindings.TARGET_GRAPH, len(bindings.TARGET_GROUPS)
    found = compile_pair(pair, tmp_path / "engines", use_plugins=True, names=[graph])[graph]
    assert found.warnings == ()
    # PageWrite, and RowAttention where it attends; where TensorRT does, once for each row group
    expected = {"PLUGIN_V3": 2} if attention == "PLUGIN_V3" else {"PLUGIN_V3": 1, "ATTENTION_INPUT": groups}
    counted = ("PLUGIN_V3", "ATTENTION_INPUT", "KV_CACHE_UPDATE")
    assert {name: found.layers[name] for name in counted if name in found.layers} == expected
    assert found.layers.get("TOPK", 0) == int("num_experts_per_tok" in keys)


def test_heads_that_tensorrt_has_no_attention_for_are_products(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "head_dim": 8, "sliding_window": 8}
    target = write_by_transformers(tmp_path / "target", "mistral", **sizes)
    drafter = write_drafter(tmp_path / "drafter", target, layers=1, taps=(0,), config_extra=NO_KEYS_OF_A_DRAFTER)
    pair = export(target, drafter, tmp_path / "graphs", EngineLimits(3, 48, 16), "bf16")
    (found,) = compile_pair(pair, tmp_path / "engines", use_plugins=True, names=[bindings.TARGET_GRAPH]).values()
    assert (found.layers["SOFTMAX"], found.warnings) == (len(bindings.TARGET_GROUPS), ())


def compiled_drafter(folder: Path, target: Path, drafter: Path) -> dict[str, dict[str, int]]:
    """Counted layers of the graphs of a drafter, for one GPU; nothing was warned of."""
    pair = export(target, drafter, folder / "graphs", EngineLimits(3, 48, 16), "bf16")
    names = [path.name for path in sorted(pair.graphs.glob("drafter*.onnx"))]
    facts = compile_pair(pair, folder / "engines", use_plugins=True, names=names)
    assert [facts[graph].warnings for graph in names] == [()] * len(names)
    return counted_layers(facts)


def test_graphs_of_an_eagle3_drafter_compile(tmp_path: Path) -> None:
    """A call makes one slot: its draw is the plugin's, its attention TensorRT's own, over rows."""
    target = write_target(tmp_path / "target", family="qwen3", layers=3, hidden=64, tied=True)
    drafter = write_eagle3(
        tmp_path / "drafter", target, "speculators", layer_ids=(1, 3), draft_ids=DRAFT_IDS, extra=TWO_DRAFTS
    )
    ingest = {"KV_CACHE_UPDATE": 2, "ROTARY_EMBEDDING": 1}
    draft = {"ATTENTION_INPUT": 1, "ATTENTION_OUTPUT": 1, "PLUGIN_V3": 1, **ingest}
    expected = {bindings.INGEST_GRAPH: ingest, bindings.DRAFT_GRAPH: draft}
    assert compiled_drafter(tmp_path, target, drafter) == expected


@pytest.mark.parametrize("mask", [{}, {"pard_token": 90}], ids=["in turn", "PARD"])
def test_the_graph_of_a_language_model_that_drafts_compiles(mask: dict[str, int], tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", layers=1, hidden=64)
    drafter = write_target(tmp_path / "drafter", family="qwen3", layers=2, hidden=48, tied=True, config_extra=mask)
    # heads of 12 are products of matrices
    expected = {"KV_CACHE_UPDATE": 4, "PLUGIN_V3": 1, "ROTARY_EMBEDDING": 2}
    assert compiled_drafter(tmp_path, target, drafter) == {bindings.MODEL_GRAPH: expected}


def test_graphs_of_medusa_heads_compile(tmp_path: Path) -> None:
    """They have no cache; a draw for each head is the plugin's."""
    target = write_target(tmp_path / "target", layers=1, hidden=64)
    drafter = write_vllm_medusa(tmp_path / "drafter", random_heads(target, num_heads=2), token_map=DRAFT_IDS)
    assert compiled_drafter(tmp_path, target, drafter) == {
        bindings.INGEST_GRAPH: {},
        bindings.DRAFT_GRAPH: {"PLUGIN_V3": 2},
    }


@pytest.mark.parametrize("form", ["DART", "MTP", "Gemma 4"])
def test_graphs_of_other_drafters_of_one_layer_compile(form: str, tmp_path: Path) -> None:
    if form == "DART":
        target = write_target(tmp_path / "target", family="qwen3", layers=3, hidden=64, tied=True)
        keys = {"target_layer_ids": [0, 1, 2], "draft_length": 1}
        drafter = write_eagle3(tmp_path / "drafter", target, "dart", extra=keys)
    elif form == "MTP":
        target = drafter = write_mimo(tmp_path / "target", hidden_size=64)
    else:
        target = write_gemma_target(tmp_path / "target", hidden_size=64, num_attention_heads=4, global_head_dim=64)
        drafter = write_gemma_eagle3(tmp_path / "drafter", target, ttt_length=2)
    pair = export(target, drafter, tmp_path / "graphs", EngineLimits(3, 48, 16), "bf16")
    facts = compile_pair(pair, tmp_path / "engines", use_plugins=True, names=[bindings.DRAFT_GRAPH], sms=(89,))
    num_slots = pair.drafter.gamma if form == "DART" else 1  # the others' slots wait for each other's drafts
    found = counted_layers(facts)[bindings.DRAFT_GRAPH]
    assert (found["PLUGIN_V3"], found["ROTARY_EMBEDDING"]) == (num_slots, num_slots)
    assert facts[bindings.DRAFT_GRAPH].warnings == ()


def check_compiled_elsewhere(pair: Pair, folder: Path, *, use_plugins: bool, names: Sequence[str] = GRAPHS) -> None:
    """Compile in a process of its own: a compiler keeps the memory of the largest build."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        call = partial(compile_pair, pair, folder, use_plugins=use_plugins, names=names)
        facts = process.submit(call).result()
    check_compiled(facts, pair, folder, use_plugins=use_plugins)


@pytest.mark.demo
def test_the_demonstration_pair_compiles(demo_target_path: Path, demo_drafter_path: Path, tmp_path: Path) -> None:
    pair = export(demo_target_path, demo_drafter_path, tmp_path / "graphs", EngineLimits(8, 2048, 256), "fp16")
    check_compiled_elsewhere(pair, tmp_path / "plugins", use_plugins=True)
    check_compiled_elsewhere(pair, tmp_path / "bodies", use_plugins=False)


def test_a_pair_of_the_shape_of_qwen3_06b_compiles(tmp_path: Path) -> None:
    target, drafter = write_large_pair(tmp_path)
    pair = export(target, drafter, tmp_path / "graphs", EngineLimits(32, 4096, 512), "bf16")
    check_compiled_elsewhere(pair, tmp_path / "plugins", use_plugins=True)
    # the target's body is RowAttention's, which is the drafter's too, and takes a minute
    check_compiled_elsewhere(pair, tmp_path / "bodies", use_plugins=False, names=DRAFTER_GRAPHS)
