"""`calibrate` on the nodes of a Ray cluster: workers answer prompts and record them, this process fits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dspark_trt.building.calibration_stage import recording_loops
from dspark_trt.building.finished import read_finished
from dspark_trt.building.renew import check_measurable
from dspark_trt.calibration.lookup import Answer
from dspark_trt.calibration.prompts import Prompt
from dspark_trt.calibration.record import Recorder
from dspark_trt.calibration.run import TEMPERATURES, record_texts, recording_order
from dspark_trt.checkpoints.spec_json import read_draft_source
from dspark_trt.commands.prompt_file import PromptLine
from dspark_trt.commands.ray_records import recorded
from dspark_trt.commands.ray_workers import ray_cluster
from dspark_trt.errors import EngineBuildError, RecipeError


class Recording:
    """What a worker does with prompts: its answers, and every block of them, verified whole."""

    def __init__(self, folder: Path, num_prompts: int, effort: dict[str, Any]) -> None:
        """`effort`: budget_s, from the first prompt on, max_tokens and num_samples.

        Raises ManifestError for a build that is unfinished or was edited, EnvironmentMissingError when it is for
        another machine.
        """
        summary, stages = read_finished(folder)
        check_measurable(folder, stages)
        self._max_seq_len = int(stages["graphs"].settings["limits"]["max_seq_len"])
        self._make_loop, self._codec = recording_loops(
            folder,
            use_cuda_graphs=summary.recipe.uses_cuda_graphs,
            gpu_memory_utilization=summary.recipe.gpu_memory_utilization,
        )
        self._num_prompts, self._effort = num_prompts, dict(effort)
        self._budget_s = self._effort.pop("budget_s")
        self._ends_at: float | None = None

    def __call__(self, lines: Sequence[PromptLine]) -> Iterator[dict[str, Any]]:
        """One result for each line, once all of them are through or the time is up."""
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + self._budget_s
        recorder = record_texts(
            self._make_loop,
            self._codec.encode_prompt,
            {line.number - 1: json.loads(line.text)["prompt"] for line in lines},
            num_prompts=self._num_prompts,
            budget_s=max(self._ends_at - now, 0.0),
            max_seq_len=self._max_seq_len,
            **self._effort,
        )
        for line in lines:
            yield _result(recorder, line.number)


def _result(recorder: Recorder, number: int) -> dict[str, Any]:
    """What was recorded of one prompt, as plain numbers."""
    return {
        "line": number,
        "is_whole": number - 1 not in recorder.unfinished,
        "blocks": [
            [logits.tolist(), acceptance.tolist(), drafts.tolist(), is_greedy, written]
            for logits, acceptance, drafts, is_greedy, group, written in recorder.rows
            if group == number - 1
        ],
        "answers": [asdict(answer) for group, answer in recorder.numbered_answers if group == number - 1],
    }


def record_over_ray(
    address: str,
    folder: Path,
    prompts: Sequence[Prompt],
    *,
    budget_s: float,
    max_tokens: int,
    num_samples: int,
    records: Path | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> Recorder:
    """As `record_blocks`; each worker has `budget_s` for its share.

    Raises as `ray_cluster` and `recorded`; EngineBuildError when workers died of a prompt; RecipeError for a build with
    drafter lookahead, whose trajectories no record holds.
    """
    if read_draft_source(folder).kind == "lookahead":
        raise RecipeError(
            "--ray: expected a drafter whose blocks are recorded, found lookahead; calibrate it without --ray"
        )
    effort = {"max_tokens": max_tokens, "num_samples": num_samples}
    lines = [
        (index + 1, json.dumps({"prompt": prompts[index].prompt, "num_prompts": len(prompts)}))
        for index in recording_order(len(prompts))
    ]
    made_of = [read_finished(folder)[0].stages["engines"], list(TEMPERATURES), effort]
    opens = partial(Recording, folder.resolve(), len(prompts), {"budget_s": budget_s, **effort})
    found = []
    with ray_cluster(address, folder, opens) as decode:
        for result in recorded(records, made_of, lines, decode):
            if "error" in result:
                raise EngineBuildError(f"prompt {result['line']}: {result['error']}")
            found.append(result)
            progress(len(found) / len(lines))
    return _put_together(sorted(found, key=lambda result: int(result["line"])))


def _put_together(results: Sequence[dict[str, Any]]) -> Recorder:
    recorder = Recorder(group_of=int)
    for result in results:
        group = result["line"] - 1
        for logits, acceptance, drafts, is_greedy, written in result["blocks"]:
            columns = np.array(logits, np.float32), np.array(acceptance), np.array(drafts, np.int64)
            recorder.rows.append((*columns, is_greedy, group, written))
        recorder.numbered_answers += [(group, Answer(**answer)) for answer in result["answers"]]
    return recorder
