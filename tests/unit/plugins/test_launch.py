"""Bundles of compiled kernels, and the launcher on a CUDA driver that only writes down what it is asked for.

The driver is a small C library: cuda-python, its marshalling of parameters and the TensorRT plugin's enqueue are the
real ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dspark_trt_plugins.bundle import CompiledKernel, KernelBundle, bundle_from_bytes, read_bundle
from dspark_trt_plugins.operation import (
    ELEMENT_BYTES,
    ElementType,
    Tensor,
    extents_of,
    form_from_attributes,
    workspace_offsets,
)
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.registry import operation_of

from tests.support.cuda_driver.build import build_driver
from tests.support.cuda_driver.record_launches import WORKSPACE, address

REPOSITORY = Path(__file__).parents[3]
FORM: Mapping[str, int | str] = {
    "gamma": 2,
    "vocab_size": 1000,
    "markov_rank": 16,
    "head_type": "vanilla",
    "has_confidence_head": 1,
    "has_confidence_bias": 0,
    "is_confidence_with_markov": 1,
    "top_n": 0,
    "hidden_size": 32,
    "weight_type": "bfloat16",
    "logits_type": "float32",
}
SHARED_BYTES = 60_000  # more than a kernel gets without asking


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


def kernel(name: str, parameters: str, shared_bytes: int = 0) -> CompiledKernel:
    return CompiledKernel(name, f"{name}_entry", tuple(parameters.split()), 2, 4, shared_bytes, name.encode())


BUNDLE = KernelBundle(
    "MarkovHead",
    FORM,
    "by hand",
    {
        90: (
            kernel("tile_logits_16", "base_logits w2 draft_logits tile_max num_requests slot", SHARED_BYTES),
            kernel("tile_logits_64", "base_logits"),
            kernel("draw_token", "draft_logits tile_max draft_ids slot"),
            kernel("confidence", "hidden scorer confidence_logits"),
        ),
        100: (),
    },
)


def record(
    driver: Path, way: str, bundle: KernelBundle, folder: Path, stream: int = 0x99
) -> subprocess.CompletedProcess:
    bundle.write(folder / "test.kernels")
    module = "tests.support.cuda_driver.record_launches"
    command = [sys.executable, "-m", module, str(driver), way, str(folder / "test.kernels"), str(stream)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def launches(result: subprocess.CompletedProcess) -> list[str]:
    return [line for line in result.stdout.splitlines() if line != "load"]


@pytest.mark.parametrize("way", ["launcher", "plugin", "plugin that a builder times", "plugin in a capture"])
def test_launches_carry_the_right_parameters_in_order(way: str, driver: Path, tmp_path: Path) -> None:
    """Three requests: inputs are numbered as the node's, outputs behind them,
    the workspace as the operation lays it out.

    Kernels are loaded once, however many contexts a plugin is attached to.
    """
    result = record(driver, way, BUNDLE, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines().count("load") == len(BUNDLE.kernels[90])
    operation = operation_of("MarkovHead", FORM)
    names = [tensor.name for tensor in (*operation.inputs, *operation.outputs)]
    at = {name: f"{address(index):x}" for index, name in enumerate(names)}
    tile_max = f"{WORKSPACE:x}"
    w2, scorer = at["markov_head.markov_w2.weight"], at["confidence_head.proj.weight"]

    def tile(slot: int) -> str:
        values = [at["base_logits"], w2, at["draft_logits"], tile_max, "3", str(slot), "0", "0"]
        return f"launch tile_logits_16_entry 1,8,1 128,1,1 {SHARED_BYTES} 99 {' '.join(values)}"

    def draw(slot: int) -> str:
        values = [at["draft_logits"], tile_max, at["draft_ids"], str(slot), "0", "0"]
        return f"launch draw_token_entry 3,1,1 128,1,1 0 99 {' '.join(values)}"

    confidence = f"launch confidence_entry 3,2,1 128,1,1 0 99 {at['hidden']} {scorer} {at['confidence_logits']} 0 0"
    dynamic_shared_bytes = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert launches(result) == [
        f"attribute tile_logits_16_entry {dynamic_shared_bytes} {SHARED_BYTES}",
        tile(0),
        draw(0),
        tile(1),
        draw(1),
        confidence,
    ]


def test_loading_in_a_capture_fails_on_the_recording_driver_as_on_a_real_one(driver: Path, tmp_path: Path) -> None:
    """So a plugin that loaded at its first call, within a capture, would fail the test before."""
    result = record(driver, "launcher loaded in a capture", BUNDLE, tmp_path)
    assert "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: operation not permitted when stream is capturing" in result.stderr


ATTENTION = KernelBundle(
    "RowAttention",
    {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "capacity": 600, "num_slots": 6, "element_type": "bfloat16"},
    "by hand",
    {
        90: (
            kernel(
                "attend_split_16",
                "query keys values last_seen accumulators maxima sums attended num_slots num_query_blocks num_splits "
                "split_positions",
            ),
            kernel("attend_split_32", "query"),
            kernel(
                "combine_splits", "last_seen accumulators maxima sums attended num_slots num_splits split_positions"
            ),
        )
    },
)


@pytest.mark.parametrize("way", ["launcher", "plugin"])
def test_attention_is_launched_in_splits(way: str, driver: Path, tmp_path: Path) -> None:
    """Three rows of five slots: 15 queries for each of 9 key heads, in 2 splits of 600 positions."""
    result = record(driver, way, ATTENTION, tmp_path)
    assert result.returncode == 0, result.stderr
    operation = operation_of("RowAttention", ATTENTION.attributes)
    offsets, _ = workspace_offsets(operation.workspace, {"B": 3, "S": 5})
    query, keys, values, last_seen, attended = (f"{address(index):x}" for index in range(5))
    parts = " ".join(f"{WORKSPACE + offsets[name]:x}" for name in ("accumulators", "maxima", "sums"))
    assert launches(result) == [
        f"launch attend_split_16_entry 9,2,1 128,1,1 0 99 {query} {keys} {values} {last_seen} {parts} {attended} 5 1 "
        "2 180 0 0",
        f"launch combine_splits_entry 135,1,1 128,1,1 0 99 {last_seen} {parts} {attended} 5 2 180 0 0",
    ]


PROMPTS = KernelBundle(
    "RowAttention",
    {**ATTENTION.attributes, "capacity": 250, "num_slots": 200},
    "by hand",
    {
        90: tuple(
            kernel(f"attend_split_{size}", "query keys values last_seen attended num_slots num_query_blocks")
            for size in (16, 32, 64)
        )
    },
)


@pytest.mark.parametrize("way", ["launcher", "plugin"])
def test_attention_over_a_prompt_chunk_is_one_launch_without_workspace(way: str, driver: Path, tmp_path: Path) -> None:
    result = record(driver, way, PROMPTS, tmp_path)
    assert result.returncode == 0, result.stderr
    assert operation_of("RowAttention", PROMPTS.attributes).workspace == ()
    query, keys, values, last_seen, attended = (f"{address(index):x}" for index in range(5))
    assert launches(result) == [
        f"launch attend_split_16_entry 9,1,1 128,1,1 0 99 {query} {keys} {values} {last_seen} {attended} 5 1 0 0"
    ]


def test_a_failed_launch_says_what_cuda_says(driver: Path, tmp_path: Path) -> None:
    result = record(driver, "launcher", BUNDLE, tmp_path, stream=-1 & (2**64 - 1))
    assert "RuntimeError: CUDA driver: CUDA_ERROR_INVALID_VALUE: invalid argument" in result.stderr


def test_a_bundle_without_code_for_the_gpu_is_refused(driver: Path, tmp_path: Path) -> None:
    result = record(driver, "launcher", replace(BUNDLE, kernels={100: BUNDLE.kernels[100]}), tmp_path)
    assert "MarkovHead: expected kernels for SM 90, found SM [100]" in result.stderr


@pytest.mark.parametrize(
    ("compiled", "device", "expected"),
    [([80, 86, 90], (8, 9), 86), ([80, 90], (8, 0), 80), ([80, 90], (9, 0), 90), ([89, 120], (12, 0), 120)],
)
def test_code_runs_on_later_minor_versions_of_8_and_on_its_own_architecture_else(
    compiled: list[int], device: tuple[int, int], expected: int
) -> None:
    bundle = replace(BUNDLE, kernels={sm: (kernel(f"for {sm}", ""),) for sm in compiled})
    assert bundle.for_device(*device)[0].name == f"for {expected}"


@pytest.mark.parametrize(
    ("compiled", "device"), [([86], (8, 0)), ([80, 90], (10, 0)), ([100], (10, 3)), ([120], (12, 1))]
)
def test_code_for_another_architecture_is_never_taken(compiled: list[int], device: tuple[int, int]) -> None:
    bundle = replace(BUNDLE, kernels={sm: (kernel("any", ""),) for sm in compiled})
    with pytest.raises(ValueError, match="expected kernels for SM"):
        bundle.for_device(*device)


def test_bundles_are_read_as_they_were_written_and_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    BUNDLE.write(tmp_path / "a.kernels")
    read = read_bundle(tmp_path / "a.kernels")
    assert read == BUNDLE
    assert read.to_bytes() == BUNDLE.to_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["a.kernels"]


@pytest.mark.parametrize("data", [b"", b"no archive", json.dumps({}).encode()])
def test_what_is_no_bundle_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"engine of X: expected compiled kernels of version 1"):
        bundle_from_bytes(data, "engine of X")


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    tensors = (Tensor("a", "float32", ("R", 4)), Tensor("b", "int64", ("R",)))
    assert extents_of(tensors, [(3, 4), (3,)]) == {"R": 3}
    for shapes in ([(3, 5), (3,)], [(3, 4), (2,)], [(3, 4, 1), (3,)]):
        with pytest.raises(ValueError, match=r"(a|b): expected shape"):
            extents_of(tensors, shapes)


def test_attributes_that_are_no_form_are_refused() -> None:
    with pytest.raises(ValueError, match=r"PrefixSelectForm: expected the attributes .* found \['gamma', 'mode'\]"):
        form_from_attributes(PrefixSelectForm, {"gamma": 7, "mode": "early_stop"})


def test_workspace_tensors_do_not_overlap() -> None:
    operation = operation_of("MarkovHead", {**FORM, "head_type": "rnn", "top_n": 7})
    offsets, size = workspace_offsets(operation.workspace, {"R": 5})
    ends = {t.name: offsets[t.name] + t.num_bytes({"R": 5}) for t in operation.workspace}
    for tensor in operation.workspace:
        assert offsets[tensor.name] % 256 == 0
        assert ends[tensor.name] <= min([o for o in offsets.values() if o > offsets[tensor.name]], default=size)


@pytest.mark.parametrize("element_type", ELEMENT_BYTES)
def test_element_sizes_are_those_of_torch(element_type: ElementType) -> None:
    assert Tensor("t", element_type, (3,)).num_bytes({}) == 3 * getattr(torch, element_type).itemsize
