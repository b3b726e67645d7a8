"""Opening and running graphs: what is missing or broken is said clearly, and steady steps rebind no cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import METADATA_KEY, SCHEMA_VERSION
from dspark_trt.contract.protocol import EngineLimits, TargetBatch
from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeTargetEngine
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from tests.support.conversations import SETTINGS, open_target
from tests.support.factories import write_target

LIMITS = EngineLimits(max_requests=3, max_seq_len=64, max_batch_tokens=32)


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    open_target(write_target(tmp_path / "target"), tmp_path / "graphs", limits=LIMITS)
    return tmp_path / "graphs"


def batch(rows: list[int], query_lengths: list[int], token: int = 1) -> TargetBatch:
    total = sum(query_lengths)
    past = np.zeros(len(rows), np.int64)
    return TargetBatch(
        np.full(total, token), np.array(rows), past, np.array(query_lengths), len(rows), np.arange(total)
    )


def test_without_onnxruntime_the_error_names_the_package_to_install(
    graphs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EnvironmentMissingError, match=r"pip install onnxruntime=="):
        OnnxRuntimeTargetEngine(graphs, SETTINGS)


def test_nothing_of_a_model_is_reported_to_anybody(graphs: Path, tmp_path: Path) -> None:
    """ONNX Runtime writes what it is about to send, names and hashes of graphs among it, below the home folder."""
    home = tmp_path / "home"
    home.mkdir()
    code = (
        "import sys, pathlib; from dspark_trt.engines.onnxruntime.session import GraphSession\n"
        "GraphSession(pathlib.Path(sys.argv[1]), num_threads=1)"
    )
    (graph,) = graphs.glob("target*.onnx")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}  # in CI, and under tests, it reports nothing anyway
    subprocess.run([sys.executable, "-c", code, graph], check=True, timeout=60, env=environment)
    assert not list(home.rglob("*"))


def test_importing_the_engines_loads_neither_onnxruntime_nor_torch() -> None:
    code = (
        "import sys, dspark_trt.engines.onnxruntime.engines, dspark_trt.graphs.target, dspark_trt.graphs.drafter\n"
        "loaded = {'onnxruntime', 'torch', 'tensorrt', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_graph_without_its_weights_is_refused(graphs: Path) -> None:
    for file in graphs.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(EngineBuildError, match="run `dspark-trt build` again"):
        OnnxRuntimeTargetEngine(graphs, SETTINGS)


def test_a_graph_of_another_version_is_refused(graphs: Path) -> None:
    path = graphs / bindings.TARGET_GRAPH
    model = onnx.load(path, load_external_data=False)
    (entry,) = (entry for entry in model.metadata_props if entry.key == METADATA_KEY)
    entry.value = entry.value.replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 99')
    path.write_bytes(model.SerializeToString())
    with pytest.raises(EngineBuildError, match=f"version {SCHEMA_VERSION}, found 99"):
        OnnxRuntimeTargetEngine(graphs, SETTINGS)


def test_a_failing_step_raises_and_the_next_one_works(graphs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = OnnxRuntimeTargetEngine(graphs, SETTINGS)
    expected = engine.forward(batch([1], [4])).logits.copy()
    with pytest.raises(EngineBuildError, match="ONNX Runtime failed"):
        engine.forward(batch([1], [4], token=10**6))  # outside the vocabulary
    np.testing.assert_array_equal(engine.forward(batch([1], [4])).logits, expected)
    assert capfd.readouterr().err == ""


def test_caches_are_bound_once_per_range_of_rows(graphs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OnnxRuntimeTargetEngine(graphs, SETTINGS)
    ranges: list[Any] = []
    caches = OnnxRuntimeTargetEngine._caches

    def counted(self: OnnxRuntimeTargetEngine, groups: Any) -> Any:
        ranges.append(groups)
        return caches(self, groups)

    monkeypatch.setattr(OnnxRuntimeTargetEngine, "_caches", counted)
    for rows, query_lengths in (
        ([0, 1], [1, 3]),
        ([1, 0], [2, 2]),
        ([0, 1], [5, 1]),
        ([0, 2], [1, 1]),
        ([0, 1], [1, 1]),
    ):
        engine.forward(batch(rows, query_lengths))
    assert len(ranges) == 2  # rows 0..1 and rows 0..2


def test_old_ranges_are_forgotten_and_come_back(tmp_path: Path) -> None:
    limits = EngineLimits(max_requests=70, max_seq_len=16, max_batch_tokens=16)
    source = read_target(str(write_target(tmp_path / "target", layers=1)))
    engine = open_target(source, tmp_path / "graphs", limits=limits)
    first = engine.forward(batch([0], [3])).logits.copy()
    for row in range(70):
        np.testing.assert_allclose(engine.forward(batch([row], [3])).logits, first, atol=1e-6)
    np.testing.assert_allclose(engine.forward(batch([0], [3])).logits, first, atol=1e-6)
