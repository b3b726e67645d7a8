"""Files of 16-bit graphs: what is linked and what is written, and which wishes are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto
from safetensors.numpy import load_file, save_file

from dspark_trt.contract import bindings
from dspark_trt.contract.dims import Attention, drafter_dims_from_metadata, target_dims_from_metadata
from dspark_trt.contract.draft_bindings import draft_inputs, draft_outputs
from dspark_trt.contract.precision import Precision
from dspark_trt.errors import ExportError
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.target import write_target_graph
from tests.support.conversations import read_pair
from tests.support.factories import write_drafter, write_target
from tests.support.wide_products import assert_summed_in_float32, wide_product
from tests.unit.graphs.test_weights import LIMITS, write

HALVES: tuple[tuple[Precision, str, int], ...] = (
    ("bf16", "bfloat16", TensorProto.BFLOAT16),
    ("fp16", "float16", TensorProto.FLOAT16),
)


def write_pair(tmp_path: Path, dtype: str, precision: Precision, **options: Any) -> Path:
    folder = write_target(tmp_path / "target", family="qwen3", dtype=dtype, hidden=128, intermediate=512)
    drafter_folder = write_drafter(tmp_path / "drafter", folder, dtype=dtype, taps=(0, 2))
    target, drafter = read_pair(folder, drafter_folder)
    graphs = tmp_path / "graphs"
    graphs.mkdir()
    common: dict[str, Any] = {"limits": LIMITS, "precision": precision, "attention": "standard", **options}
    write_target_graph(target, graphs, taps=(0, 2), gamma=5, **common)
    write_drafter_graphs(target, drafter, graphs, **common)
    return graphs


def test_products_of_float16_are_summed_in_float32() -> None:
    """In ONNX Runtime; test_tensorrt_build shows that TensorRT-RTX makes one kernel of it, tests/gpu what that sums."""
    model, x, exact = wide_product()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    assert found.dtype == np.float16
    assert_summed_in_float32(found, exact)
    in_float16 = np.cumsum(x[:1], axis=1, dtype=np.float16)[:, -1:]
    with pytest.raises(AssertionError):
        assert_summed_in_float32(in_float16, x[:1].sum(axis=1, dtype=np.float64, keepdims=True))


@pytest.mark.parametrize(("precision", "dtype", "onnx_type"), HALVES)
def test_a_checkpoint_of_the_graphs_type_is_linked(
    precision: Precision, dtype: str, onnx_type: int, tmp_path: Path
) -> None:
    graphs = write_pair(tmp_path, dtype, precision)
    for name in ("target", "drafter"):
        source = tmp_path / name / "model.safetensors"
        assert (graphs / f"{name}-0.safetensors").stat().st_ino == source.stat().st_ino
    written = [file.name for file in graphs.iterdir() if file.stat().st_nlink == 1 and file.suffix != ".onnx"]
    # fc alone is wider than the checkpoint, and in float16 only
    assert written == (["drafter.weights"] if precision == "fp16" else [])
    if written:
        assert (graphs / written[0]).stat().st_size == 128 * 256 * 4
    model = onnx.load(graphs / bindings.TARGET_GRAPH, load_external_data=False)
    assert {t.data_type for t in model.graph.initializer if t.external_data} == {onnx_type}


@pytest.mark.parametrize(("precision", "dtype", "onnx_type"), HALVES)
def test_a_float32_checkpoint_is_written_once_in_half_the_bytes(
    precision: Precision, dtype: str, onnx_type: int, tmp_path: Path
) -> None:
    graphs = write_pair(tmp_path, "float32", precision)
    source = (tmp_path / "target" / "model.safetensors").stat().st_size
    assert 0.45 * source < (graphs / "target.weights").stat().st_size < 0.6 * source


@pytest.mark.parametrize(("precision", "dtype", "onnx_type"), HALVES)
def test_dims_and_bindings_have_the_element_type(
    precision: Precision, dtype: str, onnx_type: int, tmp_path: Path
) -> None:
    graphs = write_pair(tmp_path, dtype, precision)
    readers: dict[str, Any] = {
        bindings.TARGET_GRAPH: (target_dims_from_metadata, bindings.target_inputs, bindings.target_outputs),
        bindings.INGEST_GRAPH: (drafter_dims_from_metadata, bindings.ingest_inputs, bindings.ingest_outputs),
        bindings.DRAFT_GRAPH: (drafter_dims_from_metadata, draft_inputs, draft_outputs),
    }
    for name, (read, inputs, outputs) in readers.items():
        model = onnx.load(graphs / name, load_external_data=False)
        dims = read({p.key: p.value for p in model.metadata_props}, name)
        assert dims.element_type == dtype
        # no weight is an input: TensorRT would take it for one of the caller's
        assert [value.name for value in model.graph.input] == [binding.name for binding in inputs(dims)]
        assert [value.name for value in model.graph.output] == [binding.name for binding in outputs(dims)]
        types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
        caches = [name for name in types if "_cache." in name]
        assert caches
        assert {types[cache] for cache in caches} == {onnx_type}
        assert types.get(bindings.TAPS, onnx_type) == onnx_type
        for wide in (bindings.LOGITS, bindings.DRAFT_LOGITS, bindings.CONFIDENCE_LOGITS, bindings.UNIFORMS):
            assert types.get(wide, TensorProto.FLOAT) == TensorProto.FLOAT


def test_a_weight_beyond_float16_is_refused(tmp_path: Path) -> None:
    source = write_target(tmp_path / "target", dtype="bfloat16")
    tensors = load_file(source / "model.safetensors")
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.q_proj.weight"):
        tensors[name][0, 0] = 70000
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ExportError, match=r"^target: layers\.1\.mlp\.down_proj.*within float16 \(65504\), found 7\.\d+e\+04.*bf16"
    ):
        write(source, tmp_path / "fp16", "fp16", "standard")
    write(source, tmp_path / "bf16", "bf16", "standard")


def test_a_weight_beyond_bfloat16_is_refused(tmp_path: Path) -> None:
    source = write_target(tmp_path / "target", dtype="float32")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = -3.4e38  # rounds to infinity
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ExportError, match=r"down_proj.*within bfloat16 \(3\.3895e\+38\), found 3\.4e\+38; .*onnxruntime"
    ):
        write(source, tmp_path / "bf16", "bf16", "standard")


@pytest.mark.parametrize("attention", ["gqa", "drafter"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_need_standard_attention(precision: Precision, attention: Attention, tmp_path: Path) -> None:
    source = write_target(tmp_path / "target", head_dim=16)
    with pytest.raises(ExportError, match=f"precision {precision}: expected attention 'standard', found '{attention}'"):
        write(source, tmp_path / "graphs", precision, attention)


def test_sharing_needs_a_target_graph_of_the_same_element_type(tmp_path: Path) -> None:
    graphs = write_pair(tmp_path, "float32", "bf16")
    target, drafter = read_pair(tmp_path / "target", tmp_path / "drafter")
    with pytest.raises(ExportError, match=r"type FLOAT16 to share with the drafter, found BFLOAT16; write the target"):
        write_drafter_graphs(target, drafter, graphs, limits=LIMITS, precision="fp16", attention="standard")
