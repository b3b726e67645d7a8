"""One TensorRT library in one process, on one device: what its engines share.

Nothing computes here without a GPU: TensorRT-RTX compiles without one and deserialises only with a driver.

Source: TensorRT Python API, Runtime and IExecutionContext (11.4), TensorRT-RTX 1.7.1.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from dspark_trt_plugins.registry import register_plugins

from dspark_trt.engines.device.buffers import with_index
from dspark_trt.engines.tensorrt.library import BuildLog, Library, import_library
from dspark_trt.errors import EngineBuildError
from dspark_trt.files import write_atomically
from dspark_trt.log import get_logger

logger = get_logger(__name__)

CACHE_SUFFIX = ".runtime_cache"  # beside `.engine`: kernels that TensorRT-RTX compiled here


class TensorRTRuntime:
    """Opens engines, and has the log, the stream and the memory that they work with.

    All contexts of all engines compute in one piece of memory, since everything runs in the order of one stream.
    """

    def __init__(self, library: Library, device: str) -> None:
        """Raises EnvironmentMissingError when the package is missing or too old."""
        self.trt = import_library(library)
        self.log = BuildLog(self.trt)
        self.device = with_index(torch.device(device))
        register_plugins(self.trt)  # kernels and forms are in the engines
        self._runtime = self.trt.Runtime(self.log.logger)
        self._paths: dict[int, tuple[Any, Path]] = {}  # of engines, by identity, with the engine
        self._caches: dict[Path, Any] = {}  # TensorRT-RTX: what one context compiled serves the others
        self._memory: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def deserialize(self, path: Path) -> Any:
        """An ICudaEngine. Raises EngineBuildError when the file is missing or no engine for this library and this
        GPU."""
        self.log.take()
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                engine = self._runtime.deserialize_cuda_engine(content)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise EngineBuildError(f"{path} cannot be read ({error}); run `dspark-trt build` again") from None
        if engine is None:
            raise self.failure(f"{path} cannot be opened by {self.trt.__name__} {self.trt.__version__}")
        self._paths[id(engine)] = engine, path.with_suffix(CACHE_SUFFIX)
        return engine

    def create_context(self, engine: Any, *, bound: bool) -> Any:
        """An IExecutionContext that computes in memory of ours; None where TensorRT fails.

        TensorRT-RTX compiles kernels for the shapes at hand while it runs. A bound call waits for them, since a CUDA
        graph keeps what it was captured with; prompts of ever new lengths make do with the kernels for any shape.
        """
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        specialisation = getattr(self.trt, "DynamicShapesKernelSpecializationStrategy", None)
        if specialisation is None:
            return engine.create_execution_context(strategy)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        config.dynamic_shapes_kernel_specialization_strategy = specialisation.EAGER if bound else specialisation.NONE
        if not config.set_runtime_cache(self._cache(engine, config)):
            raise self.failure("TensorRT-RTX refuses a cache of compiled kernels")
        return engine.create_execution_context(config)

    def _cache(self, engine: Any, config: Any) -> Any:
        """Kernels that were compiled for this GPU, those of an earlier process among them."""
        _, path = self._paths[id(engine)]
        if path not in self._caches:
            cache = self._caches[path] = config.create_runtime_cache()
            with suppress(OSError):
                if not cache.deserialize(path.read_bytes()):
                    self.log.take()  # of another version, driver or GPU: they are compiled again
                    logger.info("%s is of other circumstances and is not used", path)
        return self._caches[path]

    def keep_caches(self) -> None:
        """Write what was compiled beside the engines, for the next process; a folder that is not ours to write is left
        as it is."""
        for path, cache in self._caches.items():
            try:
                write_atomically(path, bytes(cache.serialize()))
            except OSError as error:
                logger.info("compiled kernels are not kept: %s", error)

    @property
    def scratch_bytes(self) -> int:
        """What contexts of the opened engines compute in."""
        return max((scratch_bytes(engine) for engine, _ in self._paths.values()), default=0)

    def memory(self, num_bytes: int) -> torch.Tensor:
        """What contexts compute in. It is replaced where it is too small; contexts keep what they got."""
        if self._memory is None or len(self._memory) < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._memory

    @contextmanager
    def stream(self) -> Iterator[int]:
        """The stream to enqueue on, in order with torch's current one.

        Not the default stream itself: TensorRT would wait for the whole device at every call.
        """
        current = torch.cuda.current_stream(self.device)
        if current != torch.cuda.default_stream(self.device):
            yield current.cuda_stream
            return
        self._stream = self._stream or torch.cuda.Stream(self.device)
        self._stream.wait_stream(current)
        try:
            yield self._stream.cuda_stream
        finally:  # a call that fails may have enqueued a part of itself
            current.wait_stream(self._stream)

    def failure(self, what: str) -> EngineBuildError:
        """With TensorRT's own words, which it logs and does not raise."""
        said = "; ".join(self.log.take()) or "it said nothing"
        return EngineBuildError(f"{what}: {said}; run `dspark-trt build` again on this machine if it stays so")


def scratch_bytes(engine: Any) -> int:
    """What a context of an engine computes in, whatever its profile."""
    sizes = (engine.get_device_memory_size_for_profile_v2(index) for index in range(engine.num_optimization_profiles))
    return int(max(1, *sizes))
