"""Graphs to engines, with `tensorrt` for the GPU here or with `tensorrt_rtx` ahead of time for given ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_trt_plugins.registry import register_plugins, unregister_plugins
from onnx.inliner import inline_local_functions

from dspark_trt.contract import bindings
from dspark_trt.engines.tensorrt.compiler.facts import ENGINE_SUFFIX, EngineFacts, engine_path, facts_path
from dspark_trt.engines.tensorrt.compiler.graphs import OpenedGraphs, compile_kernels, metadata_of, open_graphs
from dspark_trt.engines.tensorrt.compiler.memory import check_memory, weight_bytes
from dspark_trt.engines.tensorrt.compiler.network import check_layers, count_layers, parse_graph
from dspark_trt.engines.tensorrt.compiler.profiles import GRAPHS, Profile, graph_inputs, graph_profiles
from dspark_trt.engines.tensorrt.compiler.progress import BuildMonitor
from dspark_trt.engines.tensorrt.compiler.targets import CompileTargets, compile_targets
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
    """

    library: Library
    sms: tuple[int, ...] = ()
    use_plugins: bool = True
    known_timings: Path | None = None


def compile_graphs(
    graphs: Path,
    folder: Path,
    settings: CompileSettings,
    *,
    names: Sequence[str] = GRAPHS,
    progress: Progress = lambda fraction: None,
    listen: Callable[[str], None] | None = None,
) -> None:
    """Compile graphs of the folder `graphs`; each gets `{graph}.engine` and `{graph}.json` in `folder`.

    Where the package measures tactics, `folder` also gets `timing.cache`.

    Args:
        names: of profiles.GRAPHS, which all have to be there.
        progress: told the fraction of the work that is done.
        listen: gets every message of the compiler, and the engines keep their layers' names: for looking into an
            engine.

    Raises EnvironmentMissingError when a package, a driver or a GPU is missing, EngineBuildError when the GPU is of the
    wrong kind, memory cannot suffice, or a graph cannot be compiled as it is written.
    """
    trt = import_library(settings.library)
    targets = compile_targets(settings.library, settings.sms, use_plugins=settings.use_plugins)
    opened = open_graphs(graphs)
    weights = {graph: weight_bytes(opened.models[graph]) for graph in names}
    check_memory(settings.library, weights, opened.target, opened.drafter, device_bytes=targets.device_bytes)
    bundles = []
    if settings.use_plugins:
        bundles = compile_kernels([opened.models[graph] for graph in names], targets.kernel_sms)
    compiler = _Compiler(trt, settings, targets, folder, listen)
    costs = {graph: size + _SMALL_GRAPH_BYTES for graph, size in weights.items()}
    done, total = 0, sum(costs.values())
    try:
        unregister_plugins(trt)  # an opened runtime has registered them, without kernels
        if settings.use_plugins:
            register_plugins(trt, bundles)
        for graph, cost in costs.items():
            logger.info("%s: compiling for SM %s", graph, " ".join(map(str, targets.sms)))

            def tell(fraction: float, done: int = done, cost: int = cost) -> None:
                progress(_KERNELS_SHARE + (1 - _KERNELS_SHARE) * (done + fraction * cost) / total)

            tell(0.0)
            compiler.compile(opened, graph, tell)
            done += cost
            tell(0.0, done)
    finally:
        unregister_plugins(trt)


class _Compiler:
    """One builder configuration after the other, with what they share."""

    def __init__(
        self,
        trt: Any,
        settings: CompileSettings,
        targets: CompileTargets,
        folder: Path,
        listen: Callable[[str], None] | None,
    ) -> None:
        self._trt = trt
        self._settings = settings
        self._targets = targets
        self._folder = folder
        self._is_detailed = listen is not None
        self._log = BuildLog(trt, listen)
        try:
            self._builder = trt.Builder(self._log.logger)
        except TypeError as error:  # the factory gave nothing
            raise EnvironmentMissingError(
                f"{settings.library} cannot start: {'; '.join(self._log.take()) or error}; it needs the NVIDIA driver "
                "of a GPU: see `dspark-trt doctor`"
            ) from None
        self._timings = b""
        if settings.known_timings is not None and settings.known_timings.is_file():
            self._timings = settings.known_timings.read_bytes()

    def compile(self, opened: OpenedGraphs, graph: str, progress: Progress) -> None:
        """Raises EngineBuildError naming the graph, with the compiler's own words."""
        start = time.perf_counter()
        trt, settings, model = self._trt, self._settings, opened.models[graph]
        if not settings.use_plugins:  # the parser would name the nodes alike wherever a body stands
            model = inline_local_functions(model)
        network = parse_graph(trt, self._builder, model, opened.folder / graph, self._log)
        check_layers(network, model, graph, use_plugins=settings.use_plugins)
        profiles = graph_profiles(graph, opened.target.limits, opened.drafter.gamma)
        config = self._config(profiles, graph_inputs(graph, opened.target, opened.drafter))
        monitor = BuildMonitor(trt, progress)
        config.progress_monitor = monitor.monitor
        engine = self._builder.build_serialized_network(network, config)
        monitor.check()
        problems = self._log.take()
        if engine is None:
            raise EngineBuildError(
                f"{graph}: {settings.library} {trt.__version__} cannot compile the graph for SM "
                f"{' '.join(map(str, self._targets.sms))}: {'; '.join(problems) or 'it gives no reason'}; if memory "
                "was short lower --max-slots or --max-seq-len, else report this, with the version of "
                f"{settings.library}"
            )
        if dropped := [problem for problem in problems if "Unused Input" in problem]:
            raise EngineBuildError(
                f"{graph}: {settings.library} {trt.__version__} would not compute what the graph says: "
                f"{'; '.join(dropped)}; report this, with the version of {settings.library}"
            )
        with memoryview(engine) as data:
            engine_path(self._folder, graph).write_bytes(data)
        facts = EngineFacts(
            library=settings.library,
            library_version=trt.__version__,
            sms=self._targets.sms,
            use_plugins=settings.use_plugins,
            profiles=profiles,
            metadata=metadata_of(model),
            layers=count_layers(network),
            warnings=problems,
            weight_bytes=weight_bytes(model),
            engine_bytes=engine.nbytes,
            build_s=round(time.perf_counter() - start, 3),
        )
        facts_path(self._folder, graph).write_text(facts.model_dump_json(indent=1) + "\n")
        self._keep_timings(config)

    def _config(self, profiles: Sequence[Profile], inputs: Sequence[bindings.Binding]) -> Any:
        trt = self._trt
        config = self._builder.create_builder_config()
        facts = LIBRARIES[self._settings.library]
        if facts.takes_sms:
            config.num_compute_capabilities = len(self._targets.sms)
            for index, sm in enumerate(self._targets.sms):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
        if facts.has_timing_cache:
            for timings in (self._timings, b""):  # those of another GPU or version are refused
                if config.set_timing_cache(config.create_timing_cache(timings), ignore_mismatch=False):
                    break
        if self._is_detailed:
            config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
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
