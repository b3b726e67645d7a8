"""Weights are linked where they can be and written once where not; the graphs work in both cases."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import Attention
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits, TargetBatch
from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeTargetEngine
from dspark_trt.errors import ExportError
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.target import write_target_graph
from tests.support.conversations import SETTINGS, read_pair
from tests.support.factories import write_drafter, write_target

LIMITS = EngineLimits(max_requests=2, max_seq_len=64, max_batch_tokens=32)
BATCH = TargetBatch(np.arange(6), np.array([1]), np.array([0]), np.array([6]), 0, np.arange(6))


def write(source: Path, folder: Path, precision: Precision = "fp32", attention: Attention = "gqa") -> tuple[Path, ...]:
    folder.mkdir(parents=True)
    write_target_graph(
        read_target(str(source)),
        folder,
        taps=(1,),
        limits=LIMITS,
        gamma=5,
        precision=precision,
        attention=attention,
    )
    return tuple(file for file in folder.iterdir() if file.name != bindings.TARGET_GRAPH)


def logits(folder: Path) -> Any:
    return OnnxRuntimeTargetEngine(folder, SETTINGS).forward(BATCH).logits.copy()


def new_bytes(folder: Path) -> int:
    """Bytes of the folder that no other folder shares."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.stat().st_nlink == 1)


@pytest.fixture(scope="module")
def float32_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("float32"), hidden=128, intermediate=512, layers=3, shards=2)


def test_a_float32_checkpoint_is_linked_not_copied(float32_target: Path, tmp_path: Path) -> None:
    weights = write(float32_target, tmp_path / "graphs")
    sources = sorted(float32_target.glob("*.safetensors"))
    assert sorted(file.stat().st_ino for file in weights) == sorted(file.stat().st_ino for file in sources)
    assert new_bytes(tmp_path / "graphs") < 0.04 * sum(file.stat().st_size for file in sources)


def test_links_survive_a_rename_and_the_end_of_the_checkpoint(float32_target: Path, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    for file in float32_target.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    write(source, tmp_path / "graphs.partial")
    expected = logits(tmp_path / "graphs.partial")
    (tmp_path / "graphs.partial").rename(tmp_path / "graphs")
    for file in source.iterdir():
        file.unlink()
    np.testing.assert_array_equal(logits(tmp_path / "graphs"), expected)


def test_the_symlinks_of_a_hub_cache_are_followed(float32_target: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for index, file in enumerate(sorted(float32_target.iterdir())):
        (blobs / str(index)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(index))
    weights = write(snapshot, tmp_path / "graphs")
    assert not any(file.is_symlink() for file in weights)
    assert {file.stat().st_ino for file in weights} <= {file.stat().st_ino for file in blobs.iterdir()}
    write(float32_target, tmp_path / "direct")
    np.testing.assert_array_equal(logits(tmp_path / "graphs"), logits(tmp_path / "direct"))


def test_where_links_are_impossible_the_weights_are_written(
    float32_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(float32_target, tmp_path / "linked")

    def refuse(source: Any, destination: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    (weights,) = write(float32_target, tmp_path / "written")
    assert weights.stat().st_nlink == 1
    np.testing.assert_array_equal(logits(tmp_path / "written"), logits(tmp_path / "linked"))


def test_weights_that_only_their_owner_may_read_are_not_linked(float32_target: Path, tmp_path: Path) -> None:
    """A server in a container runs as another user, and a link has the mode of its file."""
    source = Path(shutil.copytree(float32_target, tmp_path / "private"))
    for file in source.glob("*.safetensors"):
        file.chmod(0o600)
    (weights,) = write(source, tmp_path / "graphs")
    assert weights.stat().st_nlink == 1
    assert weights.stat().st_mode & 0o044 == 0o044 & ~current_umask()
    assert {file.stat().st_mode & 0o777 for file in source.glob("*.safetensors")} == {0o600}


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_bfloat16_weights_are_widened_once_into_an_aligned_file(tmp_path: Path) -> None:
    source = write_target(tmp_path / "checkpoint", dtype="bfloat16", tied=True)
    (weights,) = write(source, tmp_path / "graphs")
    model = onnx.load(tmp_path / "graphs" / bindings.TARGET_GRAPH, load_external_data=False)
    external = {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data}
    assert all(int(entry["offset"]) % 4096 == 0 for entry in external.values())
    assert len({entry["offset"] for entry in external.values()}) == len(external)
    stored = np.memmap(weights, np.float32, "r", offset=int(external["embed_tokens.weight"]["offset"]), shape=(97, 32))
    np.testing.assert_array_equal(
        stored, read_target(str(source)).weights.array("embed_tokens.weight").astype(np.float32)
    )


def test_drafter_graphs_share_embedding_and_head_with_the_target(float32_target: Path, tmp_path: Path) -> None:
    target, drafter = read_pair(float32_target, write_drafter(tmp_path / "drafter", float32_target))
    write(float32_target, tmp_path / "graphs")
    before = new_bytes(tmp_path / "graphs")
    write_drafter_graphs(target, drafter, tmp_path / "graphs", limits=LIMITS, precision="fp32")
    locations = {}
    for name in (bindings.TARGET_GRAPH, bindings.DRAFT_GRAPH):
        model = onnx.load(tmp_path / "graphs" / name, load_external_data=False)
        for tensor in model.graph.initializer:
            entry = {e.key: e.value for e in tensor.external_data}
            locations[tensor.name] = (entry.get("location"), entry.get("offset"))
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert locations[f"target.{name}"] == locations[name]
    assert new_bytes(tmp_path / "graphs") - before < 400_000  # a graph for each slot count, and their rotary tables


def test_sharing_needs_a_target_graph_of_the_same_precision(float32_target: Path, tmp_path: Path) -> None:
    target, drafter = read_pair(float32_target, write_drafter(tmp_path / "drafter", float32_target))
    write(float32_target, tmp_path / "graphs")
    with pytest.raises(ExportError, match=r"lm_head\.weight\.int8"):
        write_drafter_graphs(target, drafter, tmp_path / "graphs", limits=LIMITS, precision="int4")
    form = DrafterForm("int8")
    with pytest.raises(ExportError, match=r"lm_head\.weight\.rows"):
        write_drafter_graphs(target, drafter, tmp_path / "graphs", limits=LIMITS, precision="int8", form=form)


@pytest.mark.parametrize(
    ("limits", "taps", "message"),
    [
        (EngineLimits(2, 1024, 32), (1,), "max_seq_len 1024 is beyond the 512 positions"),
        (EngineLimits(2, 64, 5), (1,), "raise --max-batch-tokens to 6"),
        (LIMITS, (1, 3), "tap layer 3 is not in the target: expected -1"),
    ],
)
def test_limits_and_taps_that_do_not_fit_are_refused(
    float32_target: Path, tmp_path: Path, limits: EngineLimits, taps: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        write_target_graph(
            read_target(str(float32_target)),
            tmp_path,
            taps=taps,
            limits=limits,
            gamma=5,
            precision="fp32",
            attention="gqa",
        )
