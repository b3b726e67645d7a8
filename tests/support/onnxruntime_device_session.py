"""DeviceSession that runs a float32 graph for devices in ONNX Runtime, straight on the memory of torch CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.contract import bindings
from dspark_trt.contract.bindings import Binding
from dspark_trt.contract.dims import DrafterDims, TargetDims, drafter_dims_from_metadata, target_dims_from_metadata
from dspark_trt.contract.draft_bindings import draft_inputs, draft_outputs
from dspark_trt.contract.model_bindings import model_inputs, model_outputs
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.select_bindings import select_inputs, select_outputs
from dspark_trt.engines.device.buffers import ALIGNMENT_BYTES
from dspark_trt.engines.device.cache import DeviceCache
from dspark_trt.engines.device.engines import DeviceEngines, DeviceSessions, open_device_engines
from dspark_trt.engines.device.pages import DevicePages
from dspark_trt.engines.device.session import Tensors
from dspark_trt.errors import EngineBuildError
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.select import write_select_graph
from dspark_trt.graphs.target import write_target_graph


class OnnxRuntimeDeviceSession:
    """Checks every tensor against the graph's bindings before it runs; counts what it does."""

    def __init__(self, graph: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_mem_pattern = False
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self.metadata = dict(self._session.get_modelmeta().custom_metadata_map)
        self.inputs: tuple[Binding, ...] = ()
        self.outputs: tuple[Binding, ...] = ()
        self.run_extents: list[dict[str, int]] = []
        self.bound_extents: list[dict[str, int]] = []
        self.is_failing = False
        self.before_call: Callable[[Tensors], None] | None = None

    @property
    def num_runs(self) -> int:
        return len(self.run_extents)

    def run(self, tensors: Tensors) -> None:
        self.run_extents.append(self._check(tensors))
        self._bound(tensors)()

    def bind(self, tensors: Tensors) -> Callable[[], None]:
        """A tensor that is bound begins where TensorRT takes an address, as far as its memory does."""
        for name, tensor in tensors.items():
            assert tensor.storage_offset() * tensor.itemsize % ALIGNMENT_BYTES == 0, name
        self.bound_extents.append(self._check(tensors))
        return self._bound(tensors)

    def _bound(self, tensors: Tensors) -> Callable[[], None]:
        binding = self._session.io_binding()
        for names, bind in ((self.inputs, binding.bind_input), (self.outputs, binding.bind_output)):
            for name in (each.name for each in names):
                tensor = tensors[name]
                element_type = np.dtype(str(tensor.dtype).removeprefix("torch."))
                bind(name, "cpu", 0, element_type.type, tuple(tensor.shape), tensor.data_ptr())

        def call() -> None:
            if self.before_call is not None:
                self.before_call(tensors)
            if self.is_failing:
                raise EngineBuildError("the backend failed, as the test wants it")
            self._session.run_with_iobinding(binding)

        return call

    def _check(self, tensors: Tensors) -> dict[str, int]:
        """Names, element types, layout and shapes are those of the bindings, and a cache is its own output."""
        expected = {each.name: each for each in (*self.inputs, *self.outputs)}
        assert set(tensors) == set(expected)
        extents: dict[str, int] = {}
        for name, tensor in tensors.items():
            assert tensor.is_contiguous(), name
            assert tensor.dtype == getattr(torch, expected[name].element_type), name
            assert len(tensor.shape) == len(expected[name].shape), name
            for size, found in zip(expected[name].shape, tensor.shape, strict=True):
                wanted = extents.setdefault(size, found) if isinstance(size, str) else size
                assert found == wanted, f"{name}: {tuple(tensor.shape)} where {size} is {wanted}"
            if bindings.cache_output(name) in tensors:
                assert tensor.data_ptr() == tensors[bindings.cache_output(name)].data_ptr(), name
        return extents


@dataclass(frozen=True)
class DevicePair:
    """Device engines over ONNX Runtime, with their sessions."""

    engines: DeviceEngines
    target: OnnxRuntimeDeviceSession
    ingest: OnnxRuntimeDeviceSession | None  # None: of a language model, whose one graph `draft` is
    draft: OnnxRuntimeDeviceSession
    select: OnnxRuntimeDeviceSession
    target_dims: TargetDims
    drafter_dims: DrafterDims
    tables: NDArray[np.int64]  # of every row, those of calls that say nothing; a test may write others, and say so


def open_device_pair(
    target: TargetCheckpoint, drafter: DrafterCheckpoint, graphs: Path, *, limits: EngineLimits
) -> DevicePair:
    """Write the graphs and open device engines on the CPU."""
    write_device_graphs(target, drafter, graphs, limits=limits)
    write_select_graph(drafter.spec, graphs, limits=limits, precision="fp32")
    is_model = (graphs / bindings.MODEL_GRAPH).exists()
    drafting = bindings.MODEL_GRAPH if is_model else bindings.DRAFT_GRAPH
    names = (bindings.TARGET_GRAPH, drafting, bindings.SELECT_GRAPH)
    verify, draft, select = (OnnxRuntimeDeviceSession(graphs / name) for name in names)
    ingest = None if is_model else OnnxRuntimeDeviceSession(graphs / bindings.INGEST_GRAPH)
    of_target = target_dims_from_metadata(verify.metadata, names[0])
    of_drafter = drafter_dims_from_metadata(draft.metadata, names[1])
    verify.inputs, verify.outputs = bindings.target_inputs(of_target), bindings.target_outputs(of_target)
    draft.inputs, draft.outputs = draft_inputs(of_drafter), draft_outputs(of_drafter)
    if ingest is None:
        draft.inputs, draft.outputs = model_inputs(of_drafter), model_outputs(of_drafter)
    else:
        ingest.inputs, ingest.outputs = bindings.ingest_inputs(of_drafter), bindings.ingest_outputs(of_drafter)
    select.inputs, select.outputs = select_inputs(of_drafter), select_outputs(of_drafter)
    sessions = DeviceSessions(verify, ingest, draft, select)
    engines = open_device_engines(sessions, of_target, of_drafter, "cpu")
    tables = np.arange(1, engines.pages.num_pages).reshape(limits.max_requests, engines.pages.table_width)
    return DevicePair(
        engines, verify, ingest, draft, select, target_dims=of_target, drafter_dims=of_drafter, tables=tables
    )


def write_device_graphs(
    target: TargetCheckpoint, drafter: DrafterCheckpoint, graphs: Path, *, limits: EngineLimits
) -> None:
    """Those of both models."""
    graphs.mkdir(parents=True, exist_ok=True)
    spec = drafter.spec
    write_target_graph(
        target,
        graphs,
        taps=spec.target_layer_ids,
        norm_last_tap=spec.is_last_tap_normed,
        limits=limits,
        gamma=spec.gamma,
        precision="fp32",
        attention="paged",
    )
    write_drafter_graphs(target, drafter, graphs, limits=limits, precision="fp32", attention="paged")


def spoil(pair: DevicePair, lengths: NDArray[np.int64], context_lengths: NDArray[np.int64] | None = None) -> None:
    """Fill with garbage whatever a call must not depend on: buffers, and every position that is not valid.

    Garbage in caches is finite, as it is after any call. An index that nobody wrote is -1, which no operator accepts as
    a row.
    """
    engines = pair.engines
    for staged in (engines.target._inputs, engines.drafter.inputs):
        staged.memory.fill_(0xFF)
    drafter: Any = engines.drafter
    for outputs in (engines.target._logits, engines.target._taps, drafter._draft_logits):
        outputs.fill_(torch.nan)
    for each in (drafter, getattr(drafter, "ingests", None)):
        if hasattr(each, "_taps"):
            each._taps.fill_(torch.nan)
    engines.drafter.fetched._memory.fill_(0xFF)
    for engine, valid in ((engines.target, lengths), (engines.drafter, context_lengths)):
        if valid is None:
            continue
        if isinstance(engine.cache, DeviceCache):
            for row, length in enumerate(valid.tolist()):
                for of_layers in engine.cache._pools:
                    of_layers[:, :, row, :, length:] = 3e4
            continue
        for pool in engine.cache.layers:
            kept = _rows(pool, pair.tables, valid)
            pool.fill_(3e4)
            for row, length in enumerate(valid.tolist()):
                pages = pool[pair.tables[row]].transpose(0, 1)  # a copy
                flat = pages.permute(0, 2, 1, 3, 4).flatten(2, 3)
                flat[:, :, :length] = kept[row]
                whole = flat.unflatten(2, (-1, pool.shape[3])).permute(2, 0, 1, 3, 4)
                pool[pair.tables[row]] = whole


def valid_positions(
    pair: DevicePair, lengths: NDArray[np.int64], cache: DevicePages | None = None
) -> list[torch.Tensor]:
    """A copy of what rows hold, [layers, 2, K, length, H] each; of the target's pages where no others are given."""
    layers = (cache or pair.engines.target.cache).layers
    of_layers = [_rows(pool, pair.tables, lengths) for pool in layers]
    return [torch.stack(rows) for rows in zip(*of_layers, strict=True)]


def _rows(pool: torch.Tensor, tables: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[torch.Tensor]:
    """[2, K, length, H] of each row."""
    rows = pool[torch.from_numpy(tables)].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
    return [row[:, :, :length].clone() for row, length in zip(rows, lengths.tolist(), strict=True)]


def spoil_row(cache: DevicePages, table: NDArray[np.int64], positions: slice) -> None:
    """NaN at some positions of a row, in the first layer."""
    pool = cache.layers[0]
    for position in range(positions.start, positions.stop):
        pool[int(table[position // pool.shape[3]]), :, :, position % pool.shape[3]] = torch.nan
