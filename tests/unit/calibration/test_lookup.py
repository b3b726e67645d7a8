"""What recorded answers say of drafts that are copied from a text."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.calibration.lookup import PRIOR_WEIGHT, Answer, TrajectoryCounts, count_lookups, fit_lookup
from dspark_trt.contract.lookup import MAX_MATCH, UNMEASURED_LOOKUP
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.support.toy_engines import LIMITS, ToyLanguage, ToyTarget, make_loop, run


def test_nothing_seen_leaves_the_unmeasured_curve() -> None:
    found = fit_lookup(count_lookups([Answer((1, 2, 3), (), is_greedy=True)]))
    assert found.greedy == pytest.approx(UNMEASURED_LOOKUP.greedy)
    assert found.sampled == pytest.approx(UNMEASURED_LOOKUP.sampled)


def test_a_text_that_repeats_itself_makes_lookups_likely_in_its_regime_only() -> None:
    found = fit_lookup(count_lookups([Answer((1, 2, 3), (1, 2, 3) * 200, is_greedy=True)]))
    assert found.greedy[-1] > 0.98
    assert found.sampled == pytest.approx(UNMEASURED_LOOKUP.sampled)


def test_a_text_without_order_makes_short_matches_unlikely() -> None:
    tokens = np.random.default_rng(0).integers(0, 20, 4000).tolist()
    found = fit_lookup(count_lookups([Answer(tokens[:10], tokens[10:], is_greedy=False)]))
    assert found.sampled[0] == pytest.approx(1 / 20, abs=0.03)


def test_the_share_of_accepted_drafts_is_counted_by_match_length() -> None:
    """Behind "1 2" stands 3 first, then 4: the second lookup of two tokens fails, one of one token holds."""
    found = fit_lookup(count_lookups([Answer((1, 2, 3), (9, 1, 2, 4), is_greedy=True)]))
    expected = list(UNMEASURED_LOOKUP.greedy)
    expected[0] = (1 + PRIOR_WEIGHT * expected[0]) / (1 + PRIOR_WEIGHT)  # 2 behind 1
    expected[1] = PRIOR_WEIGHT * expected[1] / (1 + PRIOR_WEIGHT)  # 3 was copied behind 1 2
    assert found.greedy == pytest.approx(expected)
    assert len(found.greedy) == MAX_MATCH


@pytest.mark.parametrize(("temperature", "regime"), [(0.0, 0), (1.0, 1)])
def test_drafts_of_trajectories_count_by_their_own_chance_while_a_loop_verifies_them(
    temperature: float, regime: int
) -> None:
    counts = TrajectoryCounts()
    language = ToyLanguage(vocab_size=12, order=1, num_patterns=61, scale=2.0, seed=5)
    loop = make_loop(
        ToyTarget(language, LIMITS),
        None,
        SchedulerConfig("fixed"),
        lookup=UNMEASURED_LOOKUP,
        keeps_trajectories=True,
        on_verified=counts.on_verified,
    )
    sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=1)
    run(loop, [GenerationRequest(request_id=str(at), prompt_ids=(at % 4,), sampling=sampling) for at in range(8)])
    other = 1 - regime
    assert counts.seen[other].sum() == counts.accepted[other].sum() == 0
    assert (counts.accepted <= counts.seen + 1e-9).all()
    assert 0 < counts.accepted[regime].sum() <= counts.seen[regime].sum() <= loop.totals.num_drafts_verified
    if temperature:
        assert counts.accepted[regime].sum() < counts.seen[regime].sum()
    else:
        assert counts.accepted[regime].sum() == loop.totals.num_drafts_accepted
    assert fit_lookup((counts.accepted, counts.seen)) != UNMEASURED_LOOKUP
