"""What is known of the two packages before anything is compiled: versions, GPUs, memory, profiles."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from dspark_trt_plugins.bundle import kernel_sm

from dspark_trt.contract import bindings
from dspark_trt.contract.cache_dims import CacheDims
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.contract.page_plan import page_bytes
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.tensorrt.compiler import targets as tensorrt_targets
from dspark_trt.engines.tensorrt.compiler.memory import check_memory, memory_plan, output_bytes
from dspark_trt.engines.tensorrt.compiler.profiles import GRAPHS, graph_inputs, graph_profiles
from dspark_trt.engines.tensorrt.compiler.targets import CompileTargets, compile_targets
from dspark_trt.engines.tensorrt.library import SUPPORTED_SMS, check_library, check_sms, import_library
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from dspark_trt.machine.gpu import Gpu, NoGpu
from tests.support.profile_choice import chosen_profile

LIMITS = EngineLimits(max_requests=12, max_seq_len=512, max_batch_tokens=100)
GAMMA = 7
CACHE = CacheDims(num_layers=2, num_rows=12, num_kv_heads=2, capacity=640, head_dim=16, page_positions=64)
TARGET = TargetDims(LIMITS, CACHE, "paged", vocab_size=1000, hidden_size=64, num_taps=3, element_type="bfloat16")
DRAFTER = DrafterDims(LIMITS, CACHE, "paged", 1000, 64, 3, GAMMA, element_type="bfloat16")
H200 = Gpu("NVIDIA H200", 90, 141 << 30, "580.65.06, CUDA 13.0")
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 89, 24 << 30, "580.65.06, CUDA 13.0")


def test_a_missing_or_old_package_is_named_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_library("tensorrt_rtx").startswith("1.")
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # as if it were not installed
    with pytest.raises(
        EnvironmentMissingError, match=r'package tensorrt 11\.1 or later.*pip install "tensorrt>=11\.1"'
    ):
        check_library("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.14.1.48"))
    with pytest.raises(EnvironmentMissingError, match=r"found 10\.14\.1\.48.*pip install"):
        check_library("tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="11.2.0"))
    assert check_library("tensorrt") == "11.2.0"
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", SimpleNamespace(__version__="1.2.0"))
    with pytest.raises(
        EnvironmentMissingError, match=r"tensorrt_rtx 1\.7 or later, found 1\.2\.0.*pip install tensorrt-rtx-cu13=="
    ):
        check_library("tensorrt_rtx")


def test_the_compiler_knows_the_gpus_that_are_listed() -> None:
    members = import_library("tensorrt_rtx").ComputeCapability.__members__
    assert sorted(int(name[2:]) for name in members if name[2:].isdecimal()) == list(SUPPORTED_SMS["tensorrt_rtx"])


def test_a_gpu_without_code_is_refused() -> None:
    check_sms("tensorrt_rtx", (80, 86, 89, 120))
    check_sms("tensorrt", (90, 100))
    with pytest.raises(
        EngineBuildError, match=r"^tensorrt_rtx has no code for SM 90 \(H100, H200\); use --backend tensorrt$"
    ):
        check_sms("tensorrt_rtx", (89, 90))
    with pytest.raises(
        EngineBuildError, match=r"tensorrt has no code for SM 70: expected one of SM 80 86 87 89 90 100 120$"
    ):
        check_sms("tensorrt", (70,))
    check_sms("tensorrt_rtx", (75,), use_plugins=False)
    with pytest.raises(
        EngineBuildError, match=r"kernels of the plugins have no code for SM 75 \(T4\): expected one of SM 80"
    ):
        check_sms("tensorrt_rtx", (75,))
    assert [kernel_sm(sm) for sm in (80, 86, 87, 89, 90, 103)] == [80, 86, 86, 89, 90, None]


def test_what_a_build_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_targets("tensorrt_rtx", (120, 89, 89), use_plugins=True) == CompileTargets(
        (89, 120), (89, 120), None
    )
    monkeypatch.setattr(tensorrt_targets, "look_for_gpu", lambda: H200)
    assert compile_targets("tensorrt", (), use_plugins=True) == CompileTargets((90,), (90,), H200.memory_bytes)
    with pytest.raises(EngineBuildError, match="no code for SM 90"):
        compile_targets("tensorrt_rtx", (), use_plugins=True)
    with pytest.raises(EngineBuildError, match=r"runs on, NVIDIA H200 \(SM 90\), and not for SM 89"):
        compile_targets("tensorrt", (89,), use_plugins=True)
    monkeypatch.setattr(tensorrt_targets, "look_for_gpu", lambda: NoGpu("no driver", "install one"))
    with pytest.raises(
        EnvironmentMissingError, match=r"there is no GPU \(no driver\); install one, or build on its host"
    ):
        compile_targets("tensorrt", (), use_plugins=True)
    with pytest.raises(EnvironmentMissingError, match="or give --compute-capability"):
        compile_targets("tensorrt_rtx", (), use_plugins=True)


def test_gpu_memory_is_counted() -> None:
    assert page_bytes(TARGET, DRAFTER) == 2 * (2 * 2 * 2 * 64 * 16) * 2
    tokens, drafts = 100, 12 * GAMMA
    assert output_bytes(TARGET, DRAFTER) == 4 * 1000 * (tokens + drafts) + tokens * 3 * 64 * 2 + drafts * (8 + 4)
    weights = {bindings.TARGET_GRAPH: 1 << 20, bindings.DRAFT_GRAPH: 1 << 20}
    plan = memory_plan(weights, TARGET, DRAFTER, scratch=1 << 30)
    parts = ("tensorrt", weights, plan, TARGET, DRAFTER)
    pages = check_memory(*parts, device_bytes=RTX_4090.memory_bytes, utilization=0.9)
    assert pages is not None
    assert pages.num_pages == 12 * 10 + 1, "every row can be full"
    with pytest.raises(
        EngineBuildError,
        match=r"not to fit this GPU \(weights .*scratch 1\.0 GiB.*\): KV memory: .*leave 0\.00 GB.*--gpu-memory-util",
    ):
        check_memory(*parts, device_bytes=1 << 30, utilization=0.9)


def test_host_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {bindings.TARGET_GRAPH: 1 << 30, bindings.DRAFT_GRAPH: 1 << 20}
    monkeypatch.setattr("dspark_trt.machine.cpu.memory_bytes", lambda: 5 << 30)
    parts = ("tensorrt_rtx", weights, {}, TARGET, DRAFTER)
    assert check_memory(*parts, device_bytes=None, utilization=0.9) is None
    monkeypatch.setattr("dspark_trt.machine.cpu.memory_bytes", lambda: 4 << 30)
    with pytest.raises(EngineBuildError, match=r"compiling target\.onnx .* 4\.8 GiB of host memory .* has 4\.0 GiB"):
        check_memory(*parts, device_bytes=None, utilization=0.9)


def test_a_layer_that_pads_chunks_has_profiles_of_its_own() -> None:
    """Rows times the longest chunk stay within a few times a step's tokens."""
    profiles = graph_profiles(bindings.TARGET_GRAPH, replace(TARGET, pads_chunks=True), DRAFTER)
    assert [each.name for each in profiles] == ["decode", "verify", "prefill 1", "prefill 8", "prefill 12"]


@pytest.mark.parametrize("graph", GRAPHS)
def test_profiles_cover_every_extent_and_every_call(graph: str) -> None:
    profiles = graph_profiles(graph, TARGET, DRAFTER)
    inputs = graph_inputs(graph, TARGET, DRAFTER)
    letters = {size for binding in inputs for size in binding.shape if isinstance(size, str)}
    for profile in profiles:
        assert letters <= set(profile.extents)
        for extent in profile.extents.values():
            assert 1 <= extent.smallest <= extent.usual <= extent.largest
        for binding in inputs:
            assert [len(shape) for shape in profile.shapes(binding)] == [len(binding.shape)] * 3
    largest = {"P": 121, "T": 100, "L": 100, "R": 12, "B": 12, "B_context": 12, "B_decode": 12, "S_decode": GAMMA + 1}
    for rows, length in ((1, 100), (2, 99), (8, 93), (12, 8), (1, 1)):  # of prompt chunks, 100 tokens at most
        call = largest | {"B_prefill": rows, "S_prefill": length}
        if graph == bindings.INGEST_GRAPH:
            call |= {"B_context": rows}
        chosen_profile(profiles, {name: size for name, size in call.items() if name in letters})


def test_the_tightest_profile_serves() -> None:
    profiles = graph_profiles(bindings.TARGET_GRAPH, TARGET, DRAFTER)
    idle = {"P": 30, "B_prefill": 1, "S_prefill": 1}
    calls = {
        "decode": {"T": 12, "L": 12, "B_decode": 12, "S_decode": 1} | idle,
        "verify": {"T": 60, "L": 60, "B_decode": 12, "S_decode": GAMMA + 1} | idle,
        "prefill": {"P": 9, "T": 100, "L": 5, "B_decode": 4, "S_decode": GAMMA + 1, "B_prefill": 3, "S_prefill": 70},
    }
    for name, extents in calls.items():
        assert profiles[chosen_profile(profiles, extents)].name == name
    with pytest.raises(
        EngineBuildError, match=r"fits no profile .* B_decode \(13,\) \(expected \(1,\) to \(12,\)\).*--max-requests"
    ):
        chosen_profile(profiles, calls["decode"] | {"B_decode": 13})
