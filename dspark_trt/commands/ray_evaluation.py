"""`eval` on the nodes of a Ray cluster: the same counts, over the answers that workers give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dspark_trt.building.finished import read_finished
from dspark_trt.checkpoints.spec_json import read_draft_source
from dspark_trt.commands.acceptance import EVERY_DRAFT, SEED, Acceptance, count_acceptance, fitting_prompts
from dspark_trt.commands.generation import GenerationFailedError, Result
from dspark_trt.commands.ray_generation import Answering
from dspark_trt.commands.ray_records import recorded
from dspark_trt.commands.ray_workers import ray_cluster
from dspark_trt.text import TextCodec


def evaluate_over_ray(
    address: str,
    folder: Path,
    sets: Mapping[str, Sequence[str]],
    *,
    max_tokens: int,
    temperature: float,
    records: Path | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> list[Acceptance]:
    """As `evaluate_set` for each of the sets. `records`: a file that keeps answers as they come.

    Raises as `ray_cluster` and `recorded`, ManifestError for an unfinished build, RecipeError for a set without a
    prompt that fits, GenerationFailedError when an answer fails.
    """
    summary, stages = read_finished(folder)
    max_seq_len = int(stages["graphs"].settings["limits"]["max_seq_len"])
    gamma = read_draft_source(folder).gamma
    codec = TextCodec.load(folder / "checkpoints" / "tokenizer")
    set_of: dict[int, str] = {}
    lines: list[tuple[int, str]] = []
    for name, texts in sets.items():
        for text, _ in fitting_prompts(codec, name, texts, max_tokens=max_tokens, max_seq_len=max_seq_len):
            lines.append((len(lines) + 1, json.dumps({"prompt": text})))
            set_of[len(lines)] = name
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": SEED}
    results: dict[str, list[Result]] = {name: [] for name in sets}
    made_of = [summary.stages["engines"], asdict(EVERY_DRAFT), given]
    opens = partial(Answering, folder.resolve(), EVERY_DRAFT, given, codec.has_chat_template)
    with ray_cluster(address, folder, opens) as decode:
        for done, result in enumerate(recorded(records, made_of, lines, decode), 1):
            if "error" in result:
                raise GenerationFailedError(f"{set_of[result['line']]}: {result['error']}")
            results[set_of[result["line"]]].append(result)
            progress(done / len(lines))
    return [count_acceptance(name, found, gamma=gamma) for name, found in results.items()]
