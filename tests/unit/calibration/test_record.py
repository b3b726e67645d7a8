"""Recorded labels against what acceptance does, on engines whose every probability is known."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.calibration.prompts import Prompt
from dspark_trt.calibration.record import Recording
from dspark_trt.calibration.run import _split, calibrate, record_blocks, record_texts
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.loop import DecodingLoop, OnVerified
from tests.support.toy_engines import LIMITS, ToyDrafter, ToyLanguage, ToyTarget, make_loop

GAMMA = 3
LANGUAGE = ToyLanguage(12)
PROMPTS = [
    Prompt(prompt=f"{number % 7}{number % 5}{number % 3}", split="held_out" if number % 4 == 3 else "fit")
    for number in range(40)
]


class Loops:
    """Makes loops over toy engines, and keeps the last one."""

    def __init__(self, draft_vocab: list[int] | None = None) -> None:
        self._draft_vocab = draft_vocab

    def __call__(self, scheduler: SchedulerConfig, on_verified: OnVerified | None = None) -> DecodingLoop:
        drafter = ToyDrafter(LANGUAGE, LIMITS, gamma=GAMMA, draft_vocab=self._draft_vocab)
        self.loop = make_loop(ToyTarget(LANGUAGE, LIMITS), drafter, scheduler, on_verified=on_verified)
        return self.loop


def encode(text: str) -> list[int]:
    return [int(letter) for letter in text]


def record(temperature: float, draft_vocab: list[int] | None = None) -> Recording:
    loops = Loops(draft_vocab)
    recorder = record_blocks(
        loops, encode, PROMPTS, budget_s=60.0, temperatures=(temperature,), max_tokens=50, max_seq_len=64
    )
    assert not loops.loop.has_work
    return recorder.recording(GAMMA)


@pytest.mark.parametrize("draft_vocab", [None, [0, 2, 3, 5, 8, 9, 11]])
def test_labels_of_requests_that_sample_have_the_mean_of_exact_acceptance(draft_vocab: list[int] | None) -> None:
    """The toy drafter's confidence is exact: sum over x of min(p_t, p_d), the mean of the label."""
    recording = record(1.0, draft_vocab)
    exact = 1 / (1 + np.exp(-recording.confidence_logits.astype(np.float64)))
    assert len(recording) > 300
    surprise = recording.acceptance - exact
    error = surprise.std(axis=0) / np.sqrt(len(recording))
    assert (np.abs(surprise.mean(axis=0)) < 4 * error).all()
    assert (recording.acceptance.std(axis=0) > 0.1).all()


def test_labels_of_greedy_requests_are_whether_the_target_writes_the_draft() -> None:
    recording = record(0.0)
    assert recording.is_greedy.all()
    assert set(np.unique(recording.acceptance)) == {0.0, 1.0}
    first = recording.draft_ids[:, 0] == recording.target_ids
    np.testing.assert_array_equal(recording.acceptance[:, 0] == 1.0, first)


def test_every_block_belongs_to_its_prompt_and_held_out_prompts_are_kept_apart() -> None:
    recording = record(1.0)
    to_fit, held_out = _split(recording, PROMPTS)
    assert len(to_fit) + len(held_out) == len(recording)
    assert {PROMPTS[group].split for group in to_fit.groups.tolist()} == {"fit"}
    assert {PROMPTS[group].split for group in held_out.groups.tolist()} == {"held_out"}
    assert set(recording.groups.tolist()) == set(range(len(PROMPTS)))


def test_a_calibration_says_what_it_was_fitted_and_measured_on() -> None:
    found = calibrate(Loops(), encode, PROMPTS, gamma=GAMMA, budget_s=60.0, max_seq_len=64)
    assert found.kind == "fitted"
    assert len(found.before) == len(found.after) == GAMMA
    to_fit, held_out = (sum(found.provenance[f"num_{part}_blocks"].values()) for part in ("fit", "held_out"))
    assert found.num_fit_blocks == to_fit > 2 * held_out > 0
    assert found.before[0]["num_blocks"] == held_out


@pytest.mark.parametrize("prompts", [PROMPTS[:2], []])
def test_few_prompts_leave_confidences_as_they_are_and_say_so(
    prompts: list[Prompt], caplog: pytest.LogCaptureFixture
) -> None:
    found = calibrate(Loops(), encode, prompts, gamma=GAMMA, budget_s=60.0, max_seq_len=64)
    assert (found.kind, found.greedy.slopes) == ("neutral", (1.0,) * GAMMA)
    assert "too few" in caplog.text


def test_further_samples_are_new_answers_of_requests_that_sample_alone() -> None:
    counts = []
    for num_samples in (1, 2):
        settings = {"budget_s": 60.0, "max_tokens": 20, "num_samples": num_samples, "max_seq_len": 64}
        recorder = record_blocks(Loops(), encode, PROMPTS[:8], temperatures=(0.0, 1.0), **settings)
        recording = recorder.recording(GAMMA)
        counts.append((int(recording.is_greedy.sum()), int((~recording.is_greedy).sum())))
        sampled = recording.chosen(~recording.is_greedy)
    assert counts[0][0] == counts[1][0]
    assert counts[1][1] > 1.5 * counts[0][1]
    assert len(np.unique(sampled.acceptance, axis=0)) > 1.2 * counts[0][1]


def test_the_budget_ends_a_recording() -> None:
    loops = Loops()
    recorder = record_blocks(loops, encode, PROMPTS, budget_s=0.0, max_seq_len=64)
    assert not recorder.rows
    assert loops.loop.num_queued
    assert recorder.unfinished == set(range(len(PROMPTS)))


def test_shares_of_several_machines_are_what_one_records() -> None:
    settings = {"budget_s": 60.0, "max_tokens": 20, "num_samples": 2, "max_seq_len": 64}
    whole = record_blocks(Loops(), encode, PROMPTS[:8], temperatures=(0.0, 1.0), **settings)
    parts = []
    for share in (range(0, 8, 2), range(1, 8, 2)):
        texts = {index: PROMPTS[index].prompt for index in share}
        parts.append(record_texts(Loops(), encode, texts, num_prompts=8, temperatures=(0.0, 1.0), **settings))
    assert not any(part.unfinished for part in parts)
    found = sorted(answer.token_ids for part in parts for answer in part.answers)
    assert found == sorted(answer.token_ids for answer in whole.answers)
