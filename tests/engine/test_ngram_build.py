"""A target built without a drafter: its drafts are copied, and its output is that of plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.commands.exactness import check_exactness
from dspark_trt.commands.generation import generate
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.deployment import Deployment, load_deployment

MODES = ("fixed", "fixed:2", "threshold:0.5", "early_stop", "lagged_budget", "auto")
REPEATING = [[5, 6, 7, 8] * (2 + number) + [9 + number, 5, 6] for number in range(6)]  # more requests than rows


@pytest.fixture(scope="module")
def deployment(ngram_build: Path) -> Deployment:
    return load_deployment(ngram_build)


def greedy(deployment: Deployment, mode: str, num_tokens: int = 40) -> tuple[list[list[int]], int, int]:
    """Token ids of every answer, drafts accepted, and steps of all requests together."""
    sampling = deployment.sampling_params(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    results = generate(deployment, REPEATING, sampling, parse_scheduler(mode))
    accepted = sum(result["num_drafts_accepted"] for result in results)
    return [result["token_ids"] for result in results], accepted, sum(result["num_steps"] for result in results)


@pytest.fixture(scope="module")
def plain(deployment: Deployment) -> tuple[list[list[int]], int, int]:
    return greedy(deployment, "off")


@pytest.mark.parametrize("mode", MODES)
def test_greedy_text_is_that_of_plain_decoding(
    deployment: Deployment, mode: str, plain: tuple[list[list[int]], int, int]
) -> None:
    assert greedy(deployment, mode)[0] == plain[0]


def test_drafts_are_accepted_where_a_text_repeats_itself_and_save_steps(
    deployment: Deployment, plain: tuple[list[list[int]], int, int]
) -> None:
    _, accepted, steps = greedy(deployment, "fixed")
    _, none, plain_steps = plain
    assert none == 0
    assert accepted > 20
    assert steps == plain_steps - accepted


def test_sampled_tokens_are_the_targets_own(deployment: Deployment) -> None:
    """A chi-square test with a false-failure probability of 1e-4, over all modes."""
    modes = ("fixed", "early_stop", "auto")
    found = check_exactness(deployment, REPEATING[:3], modes, num_tokens=24, num_samples=8)
    assert found.has_passed, found
    assert found.modes[0].num_drafts_verified > 100
