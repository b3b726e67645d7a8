"""`verify`: a right build passes, and each kind of wrong output is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2
from typer.testing import CliRunner

from dspark_trt.cli import app
from dspark_trt.commands import exactness
from dspark_trt.commands.exactness import NUM_CELLS, compare_greedy, probability_transform, uniformity


def texts(token_ids: list[int], gap: float = 1.0, runner_up: int = 9) -> dict[str, object]:
    return {"token_ids": token_ids, "top_log_probs": [((token, -0.1), (runner_up, -0.1 - gap)) for token in token_ids]}


def test_build_that_is_right_passes(output: Path) -> None:
    options = ["--prompts", "2", "--samples", "8", "--max-tokens", "10", "--modes", "off,fixed,auto", "--json"]
    result = CliRunner().invoke(app, ["verify", str(output), *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["has_passed"]
    assert [mode["mode"] for mode in found["modes"]] == ["off", "fixed", "auto"]
    assert all(mode["num_sampled_tokens"] == 2 * 8 * 9 for mode in found["modes"])
    assert found["modes"][1]["num_drafts_verified"] > 0


def test_drafts_accepted_without_a_test_fail_with_exit_code_4(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug that the command is for: acceptance takes every draft."""
    from dspark_trt.runtime import acceptance

    def accept_all(slot, inside, probs, block):  # type: ignore[no-untyped-def]
        return {at for at, trial in enumerate(inside) if trial.has_draft(slot)}, set()

    monkeypatch.setattr(acceptance, "_test_drafts", accept_all)
    options = ["--prompts", "2", "--samples", "16", "--max-tokens", "20", "--modes", "fixed"]
    result = CliRunner().invoke(app, ["verify", str(output), *options])
    assert result.exit_code == 4, result.output
    assert "FAILED" in result.stdout


def test_wrong_greedy_token_fails_and_a_near_tie_does_not() -> None:
    plain = texts([1, 2, 3])
    assert compare_greedy(0, plain, texts([1, 2, 3]), noise=1e-5) is None
    wrong = compare_greedy(0, plain, texts([1, 9, 3]), noise=1e-5)
    assert wrong is not None
    assert (wrong.token, wrong.is_noise) == (1, False)
    near = compare_greedy(0, texts([1, 2, 3], gap=2e-5), texts([1, 9, 3]), noise=1e-5)
    assert near is not None
    assert near.is_noise
    stranger = compare_greedy(0, texts([1, 2, 3], gap=2e-5), texts([1, 7, 3]), noise=1e-5)
    assert stranger is not None
    assert not stranger.is_noise


def test_p_value_is_that_of_the_chi_square_distribution() -> None:
    random = np.random.default_rng(1)
    statistic, p_value = uniformity(random.random(500) ** 1.05)
    assert p_value == pytest.approx(chi2.sf(statistic, NUM_CELLS - 1), rel=1e-9)
    assert uniformity(random.random(4000) ** 1.3)[1] < 1e-4


def test_fair_draws_are_uniform_and_biased_ones_are_not() -> None:
    random = np.random.default_rng(2)
    logits = random.normal(scale=2.0, size=20).astype(np.float32)
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum()
    fair = [probability_transform(logits, int(random.choice(20, p=probs)), random.random()) for _ in range(3000)]
    assert uniformity(np.array(fair))[1] > 1e-4
    flat = probs**0.7 / (probs**0.7).sum()
    biased = [probability_transform(logits, int(random.choice(20, p=flat)), random.random()) for _ in range(3000)]
    assert uniformity(np.array(biased))[1] < 1e-6


def test_false_failures_are_shared_by_the_modes() -> None:
    assert exactness.FALSE_FAILURE <= 1e-4
