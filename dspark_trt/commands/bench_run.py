"""The interleaved run behind `dspark-trt bench`: every repeat has every mode under every load, in rotated order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.calibration.prompts import packaged_prompts, read_prompts
from dspark_trt.commands.bench_load import BenchPrompt, Load, Measured, run_load
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.deployment import Deployment
from dspark_trt.errors import RecipeError
from dspark_trt.log import Progress
from dspark_trt.text import TextCodec

MIXED = "mixed"
NUM_WINDOWS = 8  # of a trace
Runner = Callable[[Load, int], Measured]  # a mode, or a server, under a load, in repeat so-and-so


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    modes: tuple[str, ...]
    concurrencies: tuple[int, ...]
    kinds: tuple[str, ...]  # at the first concurrency only, but "mixed" at all, where `is_short`
    repeats: int
    max_tokens: int
    is_short: bool = False
    budget_s: float | None = None  # no further repeat begins that would not end within it
    trace: tuple[str, str] | None = None  # kinds of prompts before and after the middle of a run, in place of `kinds`


def default_modes(gamma: int, *, is_short: bool) -> tuple[str, ...]:
    if is_short:
        return ("off", f"fixed:{gamma}", "auto")
    fixed = sorted({count for count in (1, 3, 5, 7) if count < gamma} | {gamma})
    thresholds = ("threshold:0.3", "threshold:0.5", "threshold:0.7")
    return ("off", *(f"fixed:{count}" for count in fixed), *thresholds, "early_stop", "lagged_budget", "auto")


def bench_prompts(codec: TextCodec, path: Path | None) -> list[BenchPrompt]:
    """Held-out ones first: nothing was fitted to them. Kinds in turn."""
    found = read_prompts(path) if path else packaged_prompts()
    found = sorted(found, key=lambda prompt: prompt.split != "held_out")
    by_kind: dict[str, list[BenchPrompt]] = {}
    for prompt in found:
        ids = tuple(codec.encode_prompt(prompt.prompt))
        by_kind.setdefault(prompt.kind, []).append(BenchPrompt(prompt.prompt, ids, prompt.kind))
    rounds = itertools.zip_longest(*by_kind.values())
    return [prompt for each in rounds for prompt in each if prompt is not None]


def make_loads(plan: Plan, prompts: Sequence[BenchPrompt], max_seq_len: int) -> list[Load]:
    """Raises RecipeError when a kind has no prompt that fits."""
    fitting = [prompt for prompt in prompts if len(prompt.ids) + 2 <= max_seq_len]
    if plan.trace is not None:
        return [_turning(plan, plan.trace, fitting, concurrency) for concurrency in plan.concurrencies]
    loads = []
    for kind in plan.kinds:
        of_kind = _of_kind(fitting, kind, "--kinds")
        for concurrency in plan.concurrencies if kind == MIXED or not plan.is_short else plan.concurrencies[:1]:
            count = max(concurrency, 3 if plan.is_short else 6)
            loads.append(Load(kind, concurrency, count, plan.max_tokens, of_kind))
    return loads


def _of_kind(prompts: Sequence[BenchPrompt], kind: str, option: str) -> tuple[BenchPrompt, ...]:
    found = tuple(prompt for prompt in prompts if kind in (MIXED, prompt.kind))
    if not found:
        kinds = sorted({prompt.kind for prompt in prompts})
        raise RecipeError(f"{option}: expected {MIXED} or some of {kinds}, found {kind!r}")
    return found


def _turning(plan: Plan, kinds: tuple[str, str], prompts: Sequence[BenchPrompt], concurrency: int) -> Load:
    """Requests of the first kind up to the middle, then of the second: in flight the one gives way to the other."""
    half = max((2 if plan.is_short else 3) * concurrency, 6)
    first, second = (itertools.cycle(_of_kind(prompts, kind, "--trace")) for kind in kinds)
    in_order = (*itertools.islice(first, half), *itertools.islice(second, half + concurrency))
    return Load("-to-".join(kinds), concurrency, 2 * half, plan.max_tokens, in_order, num_windows=NUM_WINDOWS)


def trace_of(text: str) -> tuple[str, str]:
    """The kinds of --trace. Raises RecipeError."""
    first, _, second = text.partition("-to-")
    if not first or not second:
        raise RecipeError(f"--trace: expected two kinds of prompts such as code-to-chat, found {text!r}")
    return first, second


def loop_runners(deployment: Deployment, modes: Sequence[str]) -> dict[str, Runner]:
    """One loop a mode for the whole run, as a server would keep it: what it learns, it keeps."""
    runners: dict[str, Runner] = {}
    for mode in modes:
        loop = deployment.make_loop(parse_scheduler(mode))
        runners[mode] = lambda load, repeat, loop=loop, mode=mode: run_load(  # type: ignore[misc]
            loop, mode, load, repeat
        )
    return runners


def measure(
    runners: dict[str, Runner], loads: Sequence[Load], plan: Plan, progress: Progress = lambda fraction: None
) -> list[Measured]:
    """A short warm-up of each runner, which is not counted; then repeats, while the budget lasts."""
    started = time.perf_counter()
    widest = max(loads, key=lambda load: load.concurrency)
    for run in runners.values():
        run(Load(widest.kind, widest.concurrency, 1, 4, widest.prompts), -1)
    results: list[Measured] = []
    num_cells, longest = plan.repeats * len(loads) * len(runners), 0.0
    for repeat in range(plan.repeats):
        begun = time.perf_counter()
        if repeat and plan.budget_s is not None and begun - started + longest > plan.budget_s:
            break
        for at, load in enumerate(loads):
            names = list(runners)
            shift = (repeat + at) % len(names)
            for name in names[shift:] + names[:shift]:
                results.append(runners[name](load, repeat))
                progress(len(results) / num_cells)
        longest = max(longest, time.perf_counter() - begun)
    progress(1.0)
    return results
