"""What can be known of TensorRT sessions without a GPU:
which profile serves a call, and what opening says where it fails."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.contract.dims import DrafterDims, TargetDims, drafter_dims, target_dims
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.engines.settings import EngineSettings
from dspark_trt.engines.tensorrt.compiler.profiles import GRAPHS, Profile, choose_profile, graph_inputs, graph_profiles
from dspark_trt.engines.tensorrt.engines import open_tensorrt_engines
from dspark_trt.engines.tensorrt.runtime import CACHE_SUFFIX, TensorRTRuntime
from dspark_trt.engines.tensorrt.session import TensorRTSession
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from tests.support.conversations import read_pair
from tests.support.factories import write_drafter, write_target
from tests.support.profile_choice import chosen_profile

LIMITS = EngineLimits(max_requests=5, max_seq_len=96, max_batch_tokens=40)


@pytest.fixture(scope="module")
def dims(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetDims, DrafterDims]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target")
    read = read_pair(target, write_drafter(folder / "drafter", target))
    return (
        target_dims(read[0].spec, num_taps=2, limits=LIMITS, attention="paged", element_type="bfloat16"),
        drafter_dims(read[1].spec, limits=LIMITS, attention="paged", element_type="bfloat16"),
    )


def some_extents(profiles: tuple[Profile, ...], seed: int) -> Iterator[dict[str, int]]:
    """The edges of every profile, one step beyond them, and calls at random."""
    random = np.random.default_rng(seed)
    for profile in profiles:
        names = list(profile.extents)
        corners = itertools.product(*[(e.smallest, e.largest) for e in profile.extents.values()])
        yield from (dict(zip(names, corner, strict=True)) for corner in corners)
        for name in names:
            usual = {each: extent.usual for each, extent in profile.extents.items()}
            yield usual | {name: profile.extents[name].largest + 1}
            yield usual | {name: profile.extents[name].smallest - 1}
        for _ in range(20):
            yield {name: int(random.integers(0, extent.largest + 3)) for name, extent in profile.extents.items()}


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_ranges_of_an_engine_give_the_profile_that_its_extents_give(
    graph: str, dims: tuple[TargetDims, DrafterDims]
) -> None:
    inputs = graph_inputs(graph, *dims)
    letters = {size for each in inputs for size in each.shape if isinstance(size, str)}  # some are of other families
    profiles = tuple(
        replace(profile, extents={name: extent for name, extent in profile.extents.items() if name in letters})
        for profile in graph_profiles(graph, *dims)
    )
    ranges = [{each.name: profile.shapes(each)[::2] for each in inputs} for profile in profiles]
    num_served = 0
    for extents in some_extents(profiles, seed=len(graph)):
        shapes = {
            each.name: tuple(extents[size] if isinstance(size, str) else size for size in each.shape) for each in inputs
        }
        try:
            expected = chosen_profile(profiles, extents)
        except EngineBuildError:
            with pytest.raises(EngineBuildError, match=rf"{graph}: a call fits no profile"):
                choose_profile(ranges, shapes, where=graph)
            continue
        num_served += 1
        assert choose_profile(ranges, shapes, where=graph) == expected
    assert num_served > 10


def test_a_call_that_fits_no_profile_is_told_what_does_not_fit() -> None:
    profiles = [{"x": ((1, 8), (4, 8)), "y": ((1,), (2,))}, {"x": ((1, 8), (9, 8)), "y": ((1,), (7,))}]
    assert choose_profile(profiles, {"x": (4, 8), "y": (2,)}, where="engine") == 0
    assert choose_profile(profiles, {"x": (4, 8), "y": (3,)}, where="engine") == 1
    with pytest.raises(EngineBuildError, match=r"x \(10, 8\) \(expected \(1, 8\) to \(9, 8\)\); build with larger"):
        choose_profile(profiles, {"x": (10, 8), "y": (2,)}, where="engine")
    with pytest.raises(EngineBuildError, match=r"y \(2, 1\)"):
        choose_profile(profiles, {"x": (4, 8), "y": (2, 1)}, where="engine")


@pytest.fixture(scope="module")
def runtime() -> TensorRTRuntime:
    return TensorRTRuntime("tensorrt_rtx", "cpu")


@pytest.fixture(scope="module")
def engine_file(runtime: TensorRTRuntime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real engine of one layer, for a GPU of SM 89."""
    trt = runtime.trt
    builder = trt.Builder(runtime.log.logger)
    network = builder.create_network(0)
    x = network.add_input("x", trt.float32, (4,))
    layer = network.add_unary(x, trt.UnaryOperation.EXP)
    network.mark_output(layer.get_output(0))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    path = tmp_path_factory.mktemp("engine") / "x.engine"
    path.write_bytes(builder.build_serialized_network(network, config))
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a driver TensorRT-RTX opens the engine")
def test_an_engine_without_a_driver_is_refused_in_the_librarys_words(
    runtime: TensorRTRuntime, engine_file: Path
) -> None:
    with pytest.raises(
        EngineBuildError, match=r"x\.engine cannot be opened by tensorrt_rtx 1\.7\S*: .*(?i:cuda)"
    ) as caught:
        TensorRTSession(engine_file, runtime)
    assert "dspark-trt build" in str(caught.value)


def test_files_that_are_no_engines_are_refused(runtime: TensorRTRuntime, tmp_path: Path) -> None:
    with pytest.raises(EngineBuildError, match=r"none\.engine cannot be read .*No such file"):
        TensorRTSession(tmp_path / "none.engine", runtime)
    empty = tmp_path / "empty.engine"
    empty.touch()
    with pytest.raises(EngineBuildError, match=r"empty\.engine cannot be read"):
        TensorRTSession(empty, runtime)
    foreign = tmp_path / "foreign.engine"
    foreign.write_bytes(b"not an engine" * 1000)
    with pytest.raises(EngineBuildError, match=r"foreign\.engine cannot be opened by tensorrt_rtx 1\.7\S*: \S+"):
        TensorRTSession(foreign, runtime)


def test_an_error_has_only_what_was_said_about_it(runtime: TensorRTRuntime, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.engine"
    foreign.write_bytes(b"not an engine" * 1000)
    messages = []
    for _ in range(2):
        with pytest.raises(EngineBuildError) as caught:
            TensorRTSession(foreign, runtime)
        messages.append(str(caught.value))
    assert len(messages[0]) == len(messages[1])


class RecordingCache:
    """An IRuntimeCache: bytes that begin with a mark are its own, others of another version."""

    MARK = b"kernels of this GPU"

    def __init__(self) -> None:
        self.content = self.MARK

    def deserialize(self, data: bytes) -> bool:
        if data.startswith(self.MARK):
            self.content = data
        return data.startswith(self.MARK)

    def serialize(self) -> bytes:
        return self.content + b"."


class RecordingEngine:
    """As far as a context is made: every one gets a cache."""

    def __init__(self) -> None:
        self.caches: list[RecordingCache] = []

    def create_runtime_config(self) -> Any:
        return SimpleNamespace(
            set_execution_context_allocation_strategy=lambda strategy: None,
            create_runtime_cache=RecordingCache,
            set_runtime_cache=lambda cache: self.caches.append(cache) or True,  # type: ignore[func-returns-value]
        )

    def create_execution_context(self, config: Any) -> Any:
        return object()


def open_recording_engine(path: Path) -> tuple[TensorRTRuntime, RecordingEngine]:
    runtime, engine = TensorRTRuntime("tensorrt_rtx", "cpu"), RecordingEngine()
    runtime._runtime = SimpleNamespace(deserialize_cuda_engine=lambda content: engine)
    assert runtime.deserialize(path) is engine
    for bound in (True, False, True):
        runtime.create_context(engine, bound=bound)
    assert len(engine.caches) == 3
    assert len({id(cache) for cache in engine.caches}) == 1, "what one context compiled serves the others"
    return runtime, engine


def test_kernels_that_were_compiled_here_are_kept_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "target.engine"
    path.write_bytes(b"engine")
    for opened in range(3):
        runtime, engine = open_recording_engine(path)
        assert engine.caches[0].content == RecordingCache.MARK + b"." * opened
        runtime.keep_caches()
    path.with_suffix(CACHE_SUFFIX).write_bytes(b"of another driver")
    assert open_recording_engine(path)[1].caches[0].content == RecordingCache.MARK


def test_a_build_that_is_not_ours_to_write_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "target.engine"
    path.write_bytes(b"engine")
    runtime, _ = open_recording_engine(path)
    path.unlink()
    tmp_path.rmdir()  # root may write into a folder that forbids it
    runtime.keep_caches()
    assert not tmp_path.exists()


def test_a_build_needs_torch_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_trt.machine.packages.torch_versions", lambda: ("2.13.0", None))
    settings = EngineSettings.model_validate_json(json.dumps({"backend": "tensorrt_rtx", "sms": [89]}))
    with pytest.raises(
        EnvironmentMissingError, match=r"torch for CUDA: torch \S+ is built without CUDA \(pip install torch"
    ):
        open_tensorrt_engines(tmp_path, settings)
