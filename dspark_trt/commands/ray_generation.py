"""A prompt file decoded by the machines of a Ray cluster.

Results are written by this process, which alone has the file, as they come. Nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dspark_trt.commands.prompt_file import FileSummary, PromptLine, PromptLines, result_lines, write_results
from dspark_trt.commands.ray_workers import ray_cluster
from dspark_trt.commands.scheduler_choice import scheduler_config
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import load_deployment


class Answering:
    """What a worker does with lines of a prompt file."""

    def __init__(self, folder: Path, scheduler: SchedulerConfig | None, given: dict[str, Any], is_chat: bool) -> None:
        """`scheduler`: None: as the build says. Raises as `load_deployment`."""
        self._deployment = load_deployment(folder)
        of_build = self._deployment.recipe.scheduler
        self._scheduler = scheduler or scheduler_config(of_build, is_build=True)
        self._given, self._is_chat = given, is_chat

    def __call__(self, lines: Sequence[PromptLine]) -> Iterator[dict[str, Any]]:
        return result_lines(self._deployment, lines, self._scheduler, self._given, is_chat=self._is_chat)


def generate_over_ray(
    address: str,
    folder: Path,
    work: PromptLines,
    results_file: Path,
    scheduler: SchedulerConfig | None,
    given: dict[str, Any],
    *,
    is_chat: bool,
    progress: Callable[[float], None],
) -> FileSummary:
    """As `generate_lines`. Raises as `ray_cluster`; RequestError when `results_file` cannot be written."""
    opens = partial(Answering, folder.resolve(), scheduler, given, is_chat)
    with ray_cluster(address, folder, opens) as decode:
        return write_results(decode(work.lines), work, results_file, progress)
