"""Calibrates a build: decode prompts at full length, fit on some, measure on the others."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dspark_trt.calibration.file import CalibrationFile, fitted, neutral, of_lookups
from dspark_trt.calibration.fit import MIN_BLOCKS, fit, fit_temperatures, reaching
from dspark_trt.calibration.lookup import Answer, Counts, TrajectoryCounts, count_lookups, fit_lookup
from dspark_trt.calibration.prompts import Prompt
from dspark_trt.calibration.quality import qualities
from dspark_trt.calibration.record import Recorder, Recording
from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.log import Progress
from dspark_trt.runtime.loop import DecodingLoop, OnVerified
from dspark_trt.runtime.request import GenerationRequest, SamplingParams

logger = logging.getLogger(__name__)

MakeLoop = Callable[[SchedulerConfig, OnVerified], DecodingLoop]
Encode = Callable[[str], Sequence[int]]
TEMPERATURES = (0.0, 0.8)  # of the requests that are recorded: greedy and sampling
MAX_TOKENS = 96
_REGIMES = {"greedy": True, "sampled": False}


def record_blocks(
    make_loop: MakeLoop,
    encode: Encode,
    prompts: Sequence[Prompt],
    *,
    budget_s: float,
    temperatures: Sequence[float] = TEMPERATURES,
    max_tokens: int = MAX_TOKENS,
    num_samples: int = 1,
    max_seq_len: int,
    observer: OnVerified | None = None,
    progress: Progress = lambda fraction: None,
) -> Recorder:
    """Answer the prompts, all drafts verified, until they are through or the time is up.

    num_samples: answers of each prompt at a temperature above 0, each from a seed of its own. observer: sees the steps
    in the recorder's place.
    """
    return record_texts(
        make_loop,
        encode,
        {index: prompts[index].prompt for index in recording_order(len(prompts))},
        num_prompts=len(prompts),
        budget_s=budget_s,
        temperatures=temperatures,
        max_tokens=max_tokens,
        num_samples=num_samples,
        max_seq_len=max_seq_len,
        observer=observer,
        progress=progress,
    )


def recording_order(num_prompts: int) -> list[int]:
    """Indices of prompts so that whatever a budget allows holds, by the order of packaged prompts, every kind."""
    return sorted(range(num_prompts), key=lambda index: (index % 40, index))


def record_texts(
    make_loop: MakeLoop,
    encode: Encode,
    texts: Mapping[int, str],
    *,
    num_prompts: int,
    budget_s: float,
    temperatures: Sequence[float] = TEMPERATURES,
    max_tokens: int = MAX_TOKENS,
    num_samples: int = 1,
    max_seq_len: int,
    observer: OnVerified | None = None,
    progress: Progress = lambda fraction: None,
) -> Recorder:
    """As `record_blocks`, of some of `num_prompts` prompts: by index, in the order in which they are asked."""
    recorder = Recorder(group_of=_index_of)
    loop = make_loop(SchedulerConfig("fixed"), observer or recorder.on_verified)
    # prompt by prompt, so that whatever the budget allows holds every regime
    tokens: dict[str, list[int]] = {}
    open_requests: set[str] = set()
    for sample, (index, text) in itertools.product(range(num_samples), texts.items()):
        prompt_ids = tuple(encode(text))
        if not 0 < len(prompt_ids) < max_seq_len:
            continue
        for number, temperature in enumerate(temperatures):
            if sample and not temperature:
                continue  # a greedy answer is the same every time
            seed = sample * num_prompts + index
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
            request_id = f"{index}-{sample}-{number}"
            tokens[request_id] = []
            open_requests.add(request_id)
            answer = Answer(prompt_ids, tokens[request_id], is_greedy=temperature == 0)
            recorder.numbered_answers.append((index, answer))
            loop.submit(GenerationRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling))
    started = time.monotonic()
    total = loop.num_queued
    while loop.has_work and (elapsed := time.monotonic() - started) < budget_s:
        for emission in loop.step():
            tokens[emission.request_id] += emission.token_ids
            if emission.finish_reason is not None:
                open_requests.discard(emission.request_id)
        progress(max(elapsed / budget_s, 1 - (loop.num_queued + loop.num_running) / max(total, 1)))
    recorder.unfinished = set(map(_index_of, open_requests))
    return recorder


def _index_of(request_id: str) -> int:
    return int(request_id.split("-")[0])


def calibrate(
    make_loop: MakeLoop,
    encode: Encode,
    prompts: Sequence[Prompt],
    *,
    gamma: int,
    budget_s: float,
    max_tokens: int = MAX_TOKENS,
    num_samples: int = 1,
    max_seq_len: int,
    is_of_lookups: bool = False,
    keeps_trajectories: bool = False,
    progress: Progress = lambda fraction: None,
) -> CalibrationFile:
    """Record the prompts here, and `fit_recorded`.

    budget_s: seconds; max_tokens: of an answer; num_samples: see `record_blocks`. keeps_trajectories: its loops verify
    them, and decode plainly otherwise.
    """
    trajectories = TrajectoryCounts()
    recorder = record_blocks(
        make_loop,
        encode,
        prompts,
        budget_s=budget_s,
        max_tokens=max_tokens,
        num_samples=num_samples,
        max_seq_len=max_seq_len,
        observer=trajectories.on_verified if keeps_trajectories else None,
        progress=progress,
    )
    effort = {"budget_s": budget_s, "max_tokens": max_tokens, "num_samples": num_samples}
    counts = (trajectories.accepted, trajectories.seen) if keeps_trajectories else None
    return fit_recorded(
        recorder, prompts, gamma=gamma, effort=effort, is_of_lookups=is_of_lookups, lookup_counts=counts
    )


def fit_recorded(
    recorder: Recorder,
    prompts: Sequence[Prompt],
    *,
    gamma: int,
    effort: Mapping[str, Any],
    is_of_lookups: bool = False,
    lookup_counts: Counts | None = None,
) -> CalibrationFile:
    """Fit on the prompts for it, measure on those held out; neutral where too few blocks were seen.

    effort: what the recording was allowed, for the provenance. is_of_lookups: there is no drafter, loops decoded
    plainly, and how often copied drafts are accepted is all there is to measure. lookup_counts: where that was seen
    already; None: it is counted in the answers.
    """
    counts = lookup_counts or count_lookups(recorder.answers)
    lookup = fit_lookup(counts)
    effort = {"num_prompts": len(prompts), "temperatures": list(TEMPERATURES), **effort}
    if is_of_lookups:
        _, seen = counts
        num_lookups = dict(zip(_REGIMES, seen.astype(int).tolist(), strict=True))  # by match length
        return of_lookups(gamma, lookup, effort | {"num_lookups": num_lookups})
    to_fit, held_out = _split(recorder.recording(gamma), prompts)
    provenance = effort | {
        "num_fit_prompts": len(np.unique(to_fit.groups)),
        "num_held_out_prompts": len(np.unique(held_out.groups)),
        "num_fit_blocks": _by_regime(to_fit),
        "num_held_out_blocks": _by_regime(held_out),
        "num_reaching": {name: _reaching(to_fit, is_greedy) for name, is_greedy in _REGIMES.items()},
    }
    if len(to_fit) < MIN_BLOCKS or len(held_out) < MIN_BLOCKS // 4:
        logger.warning(
            "calibration: %d blocks to fit and %d held out within %.0f s, too few (%d and %d); confidences stay as the "
            "drafter gives them; `dspark-trt calibrate` takes longer",
            *(len(to_fit), len(held_out), effort["budget_s"], MIN_BLOCKS, MIN_BLOCKS // 4),
        )
        return neutral(gamma, provenance, lookup)
    calibration, temperatures = fit(to_fit), fit_temperatures(to_fit)
    return fitted(
        calibration,
        temperatures,
        num_fit_blocks=len(to_fit),
        before=qualities(held_out, Calibration.from_temperatures([1.0] * gamma)),
        after=qualities(held_out, calibration),
        after_temperatures=qualities(held_out, Calibration.from_temperatures(temperatures)),
        provenance=provenance,
        lookup=lookup,
    )


def _by_regime(recording: Recording) -> dict[str, int]:
    return {name: int((recording.is_greedy == is_greedy).sum()) for name, is_greedy in _REGIMES.items()}


def _reaching(recording: Recording, is_greedy: bool) -> list[float]:
    return [round(float(each), 1) for each in reaching(recording.chosen(recording.is_greedy == is_greedy))]


def _split(recording: Recording, prompts: Sequence[Prompt]) -> tuple[Recording, Recording]:
    is_held_out = np.array([prompts[group].split == "held_out" for group in recording.groups.tolist()], dtype=bool)
    return recording.chosen(~is_held_out), recording.chosen(is_held_out)
