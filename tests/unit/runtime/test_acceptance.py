"""The acceptance rule on single blocks, on numpy and torch alike.
Whole outputs are tested in test_lossless.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dspark_trt.runtime.acceptance import Acceptance, accept
from dspark_trt.runtime.drafting import DraftBlock
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.runtime.rng import Purpose, random_words, uniforms
from dspark_trt.runtime.state import RequestState, new_state
from dspark_trt.runtime.verification import Segment
from tests.support.toy_engines import letters, softmax

LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy}
to_library = pytest.mark.parametrize("to_library", LIBRARIES.values(), ids=LIBRARIES)
GAMMA = 3


def make_state(seed: int = 0, eos: tuple[int, ...] = (), **sampling: Any) -> RequestState:
    request = GenerationRequest(
        request_id="a", prompt_ids=(0,), sampling=SamplingParams(**{"temperature": 1.0, "seed": seed, **sampling})
    )
    state = new_state(request, max_seq_len=100, eos_token_ids=eos, decode=letters)
    state.draw_words(GAMMA + 1)
    return state


def make_block(draft_ids: list[list[int]], draft_logits: Any, temperatures: list[float]) -> DraftBlock:
    return DraftBlock(
        draft_ids=np.array(draft_ids, dtype=np.int64),
        draft_logits=draft_logits,
        temperatures=np.array(temperatures, dtype=np.float32),
        confidence_logits=np.zeros((len(draft_ids), GAMMA), dtype=np.float32),
        num_usable=np.full(len(draft_ids), GAMMA),
    )


def decide(state: RequestState, draft_ids: list[int], logits: Any, draft_logits: Any, temperature: float) -> Acceptance:
    """One request with its whole block verified."""
    segment = Segment(state, 0, 1 + len(draft_ids), 0, draft_ids, 0, GAMMA)
    padded = [*draft_ids, *[0] * (GAMMA - len(draft_ids))]
    return accept([segment], logits, make_block([padded], draft_logits, [temperature]))[0]


@to_library
def test_a_greedy_block_accepts_up_to_the_first_difference(to_library: Any) -> None:
    logits = np.full((4, 5), -1.0, dtype=np.float32)
    logits[[0, 1, 2, 3], [4, 3, 2, 1]] = 1.0
    draft_logits = to_library(np.zeros((1, GAMMA, 5), dtype=np.float32))
    for drafts, expected, num_accepted in (
        ([4, 3, 2], [4, 3, 2, 1], 3),
        ([4, 3, 0], [4, 3, 2], 2),
        ([0, 3, 2], [4], 0),
        ([4], [4, 3], 1),
        ([], [4], 0),
    ):
        state = make_state(temperature=0.0)
        result = decide(state, drafts, to_library(logits[: len(drafts) + 1]), draft_logits, 0.0)
        assert (result.token_ids, result.num_accepted_drafts) == (expected, num_accepted)


def draw_block(seed: int, draft_logits: np.ndarray, temperature: float) -> list[int]:
    """Drafts by inverse CDF from the request's own uniforms; slots of these tests do not depend on each other."""
    words = random_words(make_state(seed).key, step_index=0, num_slots=GAMMA)[:, Purpose.DRAFT]
    return [
        int(np.sum(np.cumsum(softmax(logits, temperature)) <= uniform))
        for logits, uniform in zip(draft_logits, uniforms(words), strict=True)
    ]


@pytest.mark.parametrize("draft_temperature", [1.0, 0.0], ids=["sampled drafts", "argmax drafts"])
@to_library
def test_the_first_token_follows_the_target_also_when_drafts_are_argmax(
    to_library: Any, draft_temperature: float
) -> None:
    """D20: an argmax draft is a point mass; scored as a softmax it would bias the output.

    chi-square over 1500 fixed draws; the chance of a false failure, had they been random, is 1e-4 for each of 4 runs.
    """
    random = np.random.default_rng(3)
    logits = random.normal(scale=1.5, size=(GAMMA + 1, 6)).astype(np.float32)
    draft_logits = random.normal(scale=1.5, size=(GAMMA, 6)).astype(np.float32)
    counts = np.zeros(6)
    for seed in range(1500):
        drafts = draw_block(seed, draft_logits, draft_temperature)
        result = decide(make_state(seed), drafts, to_library(logits), to_library(draft_logits[None]), draft_temperature)
        counts[result.token_ids[0]] += 1
    assert chisquare(counts, 1500 * softmax(logits[0], 1.0)).pvalue > 1e-4


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@to_library
def test_draft_logits_that_are_not_finite_end_the_block_and_leave_the_target_alone(
    to_library: Any, poison: float
) -> None:
    """D27: slot 2 of the block is poisoned. The block ends before it, with a token of the target."""
    logits = np.random.default_rng(1).normal(size=(GAMMA + 1, 6)).astype(np.float32)
    draft_logits = logits[None, :GAMMA].copy()  # a perfect drafter: slot 1 is always accepted
    draft_logits[0, 1, :] = poison
    counts = np.zeros(6)
    for seed in range(600):
        drafts = [*draw_block(seed, draft_logits[0, :1].repeat(GAMMA, axis=0), 1.0)[:1], seed % 6, 0]
        result = decide(make_state(seed), drafts, to_library(logits), to_library(draft_logits), 1.0)
        assert result.error is None
        assert len(result.token_ids) == 2, "slot 1 is accepted, slot 2 is drawn from the target"
        assert result.token_ids[0] == drafts[0]
        counts[result.token_ids[1]] += 1
    assert chisquare(counts, 600 * softmax(logits[1], 1.0)).pvalue > 1e-4


def test_a_draft_that_its_own_distribution_excludes_is_no_proposal() -> None:
    logits = np.zeros((2, 5), dtype=np.float32)
    logits[0, [2, 4]] = 30.0
    draft_logits = np.zeros((1, GAMMA, 5), dtype=np.float32)
    draft_logits[0, 0, 4] = -np.inf
    tokens = {decide(make_state(seed), [4], logits, draft_logits, 1.0).token_ids[0] for seed in range(50)}
    assert tokens == {2, 4}, "drawn from the target, not taken over"


@to_library
def test_target_logits_that_are_not_finite_fail_their_request_alone(to_library: Any) -> None:
    logits = np.zeros((3, 5), dtype=np.float32)
    logits[:, 2] = 9.0
    for poison in (np.nan, np.inf, -np.inf):
        poisoned = logits.copy()
        poisoned[1, 0] = poison
        segments = [
            Segment(make_state(seed=index, temperature=temperature), index, 1, index, [], index, 0)
            for index, temperature in enumerate((0.0, 0.0, 1.0))
        ]
        healthy, failed, sampled = accept(segments, to_library(poisoned), None)
        assert healthy.token_ids == [2]
        assert (healthy.error, sampled.error) == (None, None)
        assert failed.error is not None
        assert "not finite" in failed.error
        assert failed.token_ids == []
        assert failed.num_committed(segments[1]) == 0


def test_a_row_behind_a_rejection_is_never_looked_at() -> None:
    logits = np.zeros((4, 5), dtype=np.float32)
    logits[0, 2] = 9.0
    logits[1:] = np.nan
    result = decide(make_state(temperature=0.0), [0, 1, 2], logits, np.zeros((1, GAMMA, 5), np.float32), 0.0)
    assert (result.token_ids, result.error) == ([2], None)


@to_library
def test_a_draft_that_the_target_excludes_is_rejected_even_by_a_uniform_of_zero(to_library: Any) -> None:
    state = make_state(bad_words=((1,),))
    state.words[:] = 0
    logits = np.zeros((4, 5), dtype=np.float32)
    result = decide(state, [1, 1, 1], to_library(logits), to_library(np.zeros((1, GAMMA, 5), dtype=np.float32)), 1.0)
    assert result.num_accepted_drafts == 0
    assert result.token_ids == [0], "the residual of equal distributions but for token 1, at u = 0"


@to_library
def test_a_block_ends_at_an_accepted_eos_without_a_bonus(to_library: Any) -> None:
    logits = np.zeros((4, 5), dtype=np.float32)
    logits[[0, 1, 2, 3], [1, 4, 1, 1]] = 9.0
    state = make_state(temperature=0.0, eos=(4,))
    result = decide(state, [1, 4, 1], to_library(logits), to_library(np.zeros((1, GAMMA, 5), dtype=np.float32)), 0.0)
    assert (result.token_ids, result.num_accepted_drafts) == ([1, 4], 2)


@to_library
def test_processors_see_the_drafts_accepted_before(to_library: Any) -> None:
    """A frequency penalty of 2 a token: the third 1 loses against 3 although the raw logits never change."""
    logits = np.zeros((4, 5), dtype=np.float32)
    logits[:, 1], logits[:, 3] = 5.0, 2.0
    state = make_state(temperature=0.0, frequency_penalty=2.0)
    draft_logits = to_library(np.zeros((1, GAMMA, 5), dtype=np.float32))
    result = decide(state, [1, 1, 1], to_library(logits), draft_logits, 0.0)
    assert (result.token_ids, result.num_accepted_drafts) == ([1, 1, 3], 2)


@to_library
def test_log_probs_are_raw_for_accepted_replaced_and_bonus_tokens(to_library: Any) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    greedy = logits.argmax(axis=1).tolist()
    for drafts in (greedy[:3], [greedy[0], (greedy[1] + 1) % 5, 0]):
        state = make_state(temperature=0.0, num_log_probs=2, frequency_penalty=0.01)
        draft_logits = to_library(np.zeros((1, GAMMA, 5), dtype=np.float32))
        result = decide(state, drafts, to_library(logits), draft_logits, 0.0)
        for slot, token in enumerate(result.token_ids):
            raw = np.log(softmax(logits[slot], 1.0))
            assert result.log_probs[slot] == pytest.approx(raw[token], abs=1e-5)
            assert [each for each, _ in result.top_log_probs[slot]] == np.argsort(-raw)[:2].tolist()
        assert len(result.log_probs) == len(result.top_log_probs) == len(result.token_ids)
