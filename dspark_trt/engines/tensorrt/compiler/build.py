"""Graphs to engines, with `tensorrt` for the GPU here or with `tensorrt_rtx` ahead of time for given ones."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from dspark_trt_plugins.registry import register_plugins, unregister_plugins
from onnx.inliner import inline_local_functions

from dspark_trt.contract import bindings
from dspark_trt.contract.page_plan import DEFAULT_UTILIZATION
from dspark_trt.engines.tensorrt.compiler.facts import ENGINE_SUFFIX, EngineFacts, engine_path, facts_path
from dspark_trt.engines.tensorrt.compiler.graphs import OpenedGraphs, compile_kernels, metadata_of, open_graphs
from dspark_trt.engines.tensorrt.compiler.memory import check_memory, listed, memory_plan, weight_bytes
from dspark_trt.engines.tensorrt.compiler.network import check_layers, check_warnings, count_layers, parse_graph
from dspark_trt.engines.tensorrt.compiler.profiles import Profile, graph_inputs
from dspark_trt.engines.tensorrt.compiler.progress import BuildMonitor
from dspark_trt.engines.tensorrt.compiler.scratch import check_elements, scratch_bytes
from dspark_trt.engines.tensorrt.compiler.targets import compile_targets
from dspark_trt.engines.tensorrt.library import LIBRARIES, BuildLog, Library, check_library, import_library
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError
from dspark_trt.log import Progress, get_logger

__all__ = ["ENGINE_SUFFIX", "TIMING_CACHE", "CompileSettings", "check_library", "compile_graphs"]

logger = get_logger(__name__)

TIMING_CACHE = "timing.cache"
_KERNELS_SHARE = 0.1  # of the time, roughly
_SMALL_GRAPH_BYTES = 32 << 20  # what a graph without weights costs, as if it were weights


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """How graphs are compiled.

    Args:
        sms: GPU architectures, where the package takes them; empty: that of the GPU here.
        use_plugins: False inlines the function bodies of the plugins' nodes.
        known_timings: `timing.cache` of an earlier build; it need not exist.
        gpu_memory_utilization: how much of the memory of the GPU here the engines may take.
    """

    library: Library
    sms: tuple[int, ...] = ()
    use_plugins: bool = True
    known_timings: Path | None = None
    gpu_memory_utilization: float = DEFAULT_UTILIZATION


def compile_graphs(
    graphs: Path, folder: Path, settings: CompileSettings, *, progress: Progress = lambda fraction: None
) -> None:
    """Compile the graphs of the folder `graphs`; each gets `{graph}.engine` and `{graph}.json` in `folder`.

    Where the package measures tactics, `folder` also gets `timing.cache`. `progress` is told the fraction of the work
    that is done.

    Raises EnvironmentMissingError when a package, a driver or a GPU is missing, EngineBuildError when the GPU is of the
    wrong kind, memory cannot suffice, or a graph cannot be compiled as it is written.
    """
    compiler = GraphCompiler(settings, folder)
    opened = open_graphs(graphs)
    weights = {graph: weight_bytes(model) for graph, model in opened.models.items()}
    plan = memory_plan(weights, opened.target, opened.drafter, _check_and_plan_scratch(opened))
    pages = check_memory(
        settings.library,
        weights,
        plan,
        opened.target,
        opened.drafter,
        device_bytes=compiler.targets.device_bytes,
        utilization=settings.gpu_memory_utilization,
    )
    logger.info("memory of a GPU, estimated: %s; KV: %s", listed(plan), pages.words if pages else "what is left")
    costs = {graph: size + _SMALL_GRAPH_BYTES for graph, size in weights.items()}
    done, total = 0, sum(costs.values())
    with compiler.plugins(opened.models.values()):
        for graph, cost in costs.items():

            def tell(fraction: float, done: int = done, cost: int = cost) -> None:
                progress(_KERNELS_SHARE + (1 - _KERNELS_SHARE) * (done + fraction * cost) / total)

            tell(0.0)
            compiler.compile(opened, graph, tell)
            done += cost
            tell(0.0, done)


def _check_and_plan_scratch(opened: OpenedGraphs) -> int:
    """Bytes of the largest profile of any graph. Raises EngineBuildError where TensorRT could not count a tensor."""
    sizes = []
    for graph, model in opened.models.items():
        dims = opened.target if graph == bindings.TARGET_GRAPH else opened.drafter
        inputs = graph_inputs(graph, opened.target, opened.drafter)
        for profile in opened.profiles(graph):
            check_elements(graph, inputs, model, dims, profile)
            sizes.append(scratch_bytes(model, dims, profile))
    return max(sizes)


class GraphCompiler:
    """Compiles one graph after the other, with what they share: targets, the compiler's log, measured tactics."""

    def __init__(self, settings: CompileSettings, folder: Path) -> None:
        """Raises EnvironmentMissingError and EngineBuildError as `compile_graphs` does."""
        self.trt = trt = import_library(settings.library)
        self.targets = compile_targets(settings.library, settings.sms, use_plugins=settings.use_plugins)
        self.log = BuildLog(trt)
        self._settings = settings
        self._folder = folder
        try:
            self._builder = trt.Builder(self.log.logger)
        except TypeError as error:  # the factory gave nothing
            raise EnvironmentMissingError(
                f"{settings.library} cannot start: {'; '.join(self.log.take()) or error}; it needs the NVIDIA driver "
                "of a GPU: see `dspark-trt doctor`"
            ) from None
        self._timings = b""
        if settings.known_timings is not None and settings.known_timings.is_file():
            self._timings = settings.known_timings.read_bytes()

    @contextmanager
    def plugins(self, models: Iterable[onnx.ModelProto]) -> Iterator[None]:
        """Let the parser make plugins of these graphs' nodes, with kernels that are compiled first; or of none."""
        bundles = compile_kernels(models, self.targets.kernel_sms) if self._settings.use_plugins else []
        unregister_plugins(self.trt)  # an opened runtime has registered them, without kernels
        try:
            if self._settings.use_plugins:
                register_plugins(self.trt, bundles)
            yield
        finally:
            unregister_plugins(self.trt)

    def compile(self, opened: OpenedGraphs, graph: str, progress: Progress) -> None:
        """Raises EngineBuildError naming the graph, with the compiler's own words."""
        start = time.perf_counter()
        trt, settings, model = self.trt, self._settings, opened.models[graph]
        logger.info("%s: compiling for SM %s", graph, " ".join(map(str, self.targets.sms)))
        if not settings.use_plugins:  # the parser would name the nodes alike wherever a body stands
            model = inline_local_functions(model)
        network, warnings = parse_graph(trt, self._builder, model, opened.folder / graph, self.log)
        check_layers(network, model, graph, use_plugins=settings.use_plugins)
        profiles = opened.profiles(graph)
        config = self.configuration(profiles, graph_inputs(graph, opened.target, opened.drafter))
        monitor = BuildMonitor(trt, progress)
        config.progress_monitor = monitor.monitor
        engine = self._builder.build_serialized_network(network, config)
        monitor.check()
        problems = self.log.take()
        if engine is None:
            raise EngineBuildError(
                f"{graph}: {settings.library} {trt.__version__} cannot compile the graph for SM "
                f"{' '.join(map(str, self.targets.sms))}: {'; '.join(problems) or 'it gives no reason'}; if memory "
                "was short lower --max-requests or --max-seq-len, else report this, with the version of "
                f"{settings.library}"
            )
        check_warnings(trt, graph, problems)
        with memoryview(engine) as data:
            engine_path(self._folder, graph).write_bytes(data)
        facts = EngineFacts(
            library=settings.library,
            library_version=trt.__version__,
            sms=self.targets.sms,
            use_plugins=settings.use_plugins,
            profiles=profiles,
            metadata=metadata_of(model),
            layers=count_layers(network),
            warnings=warnings + problems,
            weight_bytes=weight_bytes(model),
            engine_bytes=engine.nbytes,
            build_s=round(time.perf_counter() - start, 3),
        )
        facts_path(self._folder, graph).write_text(facts.model_dump_json(indent=1) + "\n")
        self._keep_timings(config)

    def configuration(self, profiles: Sequence[Profile], inputs: Sequence[bindings.Binding]) -> Any:
        """An IBuilderConfig for one graph."""
        trt = self.trt
        config = self._builder.create_builder_config()
        facts = LIBRARIES[self._settings.library]
        if facts.takes_sms:
            config.num_compute_capabilities = len(self.targets.sms)
            for index, sm in enumerate(self.targets.sms):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)  # pools are written in place
        if facts.has_timing_cache:
            for timings in (self._timings, b""):  # those of another GPU or version are refused
                if config.set_timing_cache(config.create_timing_cache(timings), ignore_mismatch=False):
                    break
        for profile in profiles:
            shapes = self._builder.create_optimization_profile()
            for binding in inputs:
                shapes.set_shape(binding.name, *profile.shapes(binding))
            config.add_optimization_profile(shapes)
        return config

    def _keep_timings(self, config: Any) -> None:
        if LIBRARIES[self._settings.library].has_timing_cache:
            self._timings = bytes(config.get_timing_cache().serialize())
            (self._folder / TIMING_CACHE).write_bytes(self._timings)
