"""Calibrates a build: decode prompts at full length, fit on some, measure on the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from dspark_trt.calibration.file import CalibrationFile, fitted, neutral
from dspark_trt.calibration.fit import MIN_BLOCKS, fit, fit_temperatures, qualities
from dspark_trt.calibration.prompts import Prompt
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


def record_blocks(
    make_loop: MakeLoop,
    encode: Encode,
    prompts: Sequence[Prompt],
    *,
    budget_s: float,
    temperatures: Sequence[float] = TEMPERATURES,
    max_tokens: int = MAX_TOKENS,
    max_seq_len: int,
    progress: Progress = lambda fraction: None,
) -> Recorder:
    """Answer the prompts, all drafts verified, until they are through or the time is up."""
    recorder = Recorder(group_of=lambda request_id: int(request_id.split("-")[0]))
    loop = make_loop(SchedulerConfig("fixed"), recorder.on_verified)
    # prompt by prompt, so that whatever the budget allows holds every regime and, by their order, every kind
    order = sorted(range(len(prompts)), key=lambda index: (index % 40, index))
    for index in order:
        prompt_ids = tuple(encode(prompts[index].prompt))
        if not 0 < len(prompt_ids) < max_seq_len:
            continue
        for number, temperature in enumerate(temperatures):
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index)
            loop.submit(GenerationRequest(request_id=f"{index}-{number}", prompt_ids=prompt_ids, sampling=sampling))
    started = time.monotonic()
    total = loop.num_queued
    while loop.has_work and (elapsed := time.monotonic() - started) < budget_s:
        loop.step()
        progress(max(elapsed / budget_s, 1 - (loop.num_queued + loop.num_running) / max(total, 1)))
    return recorder


def calibrate(
    make_loop: MakeLoop,
    encode: Encode,
    prompts: Sequence[Prompt],
    *,
    gamma: int,
    budget_s: float,
    max_seq_len: int,
    progress: Progress = lambda fraction: None,
) -> CalibrationFile:
    """Fit on the prompts for it, measure on those held out; neutral where too few blocks were seen."""
    recorder = record_blocks(make_loop, encode, prompts, budget_s=budget_s, max_seq_len=max_seq_len, progress=progress)
    recording = recorder.recording(gamma)
    to_fit, held_out = _split(recording, prompts)
    if len(to_fit) < MIN_BLOCKS or len(held_out) < MIN_BLOCKS // 4:
        logger.warning(
            "calibration: %d blocks to fit and %d held out within %.0f s, too few (%d and %d); confidences stay as the "
            "drafter gives them; `dspark-trt calibrate` takes longer",
            *(len(to_fit), len(held_out), budget_s, MIN_BLOCKS, MIN_BLOCKS // 4),
        )
        return neutral(gamma)
    calibration = fit(to_fit)
    return fitted(
        calibration,
        fit_temperatures(to_fit),
        num_fit_blocks=len(to_fit),
        before=qualities(held_out, Calibration.from_temperatures([1.0] * gamma)),
        after=qualities(held_out, calibration),
        provenance={"num_held_out_blocks": len(held_out), "temperatures": list(TEMPERATURES), "budget_s": budget_s},
    )


def _split(recording: Recording, prompts: Sequence[Prompt]) -> tuple[Recording, Recording]:
    is_held_out = np.array([prompts[group].split == "held_out" for group in recording.groups.tolist()], dtype=bool)
    return recording.chosen(~is_held_out), recording.chosen(is_held_out)
