"""Chi-square of whole outputs of the toy engines against the target's exact distribution.

Every output of a small language is enumerated with its exact probability (plain reference, float64). Batches of 4 rows
with slot churn: requests of several lengths and prompts join and leave all the time. Outputs are compared token prefix
by token prefix (1, 2, 3 and 4 tokens), since few large cells show a small bias that many small ones hide.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from dspark_trt.contract.lookup import LookupAcceptance
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.steptable.table import StepTable
from tests.support.fused_acceptance import AcceptanceOfArrays, open_acceptance
from tests.support.runtime_reference import sequence_probs
from tests.support.toy_engines import (
    LIMITS,
    MODERATE,
    ToyDrafter,
    ToyLanguage,
    ToyTarget,
    honest_confidence,
    make_loop,
    run,
)
from tests.support.toy_step_engine import ToyStepEngine

FALSE_FAILURE = 1e-4
LANGUAGE = ToyLanguage(vocab_size=4, order=2, num_patterns=31, scale=1.2, seed=3)
PROMPT = (1, 2)
NUM_SAMPLES = 1000


def smallest_pvalue(outputs: list[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Over all prefix lengths. An output that the target cannot give fails at once."""
    assert sum(exact.values()) == pytest.approx(1.0)
    assert set(outputs) <= set(exact), "an output that the target never gives"
    pvalues = []
    for length in range(1, max(map(len, exact)) + 1):
        counts = Counter(output[:length] for output in outputs)
        probs: dict[tuple[int, ...], float] = {}
        for sequence, prob in exact.items():
            probs[sequence[:length]] = probs.get(sequence[:length], 0.0) + prob
        pvalues.append(chi_square_pvalue(counts, probs, len(outputs)))
    return min(pvalues)


def chi_square_pvalue(counts: Counter[tuple[int, ...]], probs: dict[tuple[int, ...], float], num_outputs: int) -> float:
    """Cells with an expectation below 5 are pooled."""
    common = [cell for cell, prob in probs.items() if prob * num_outputs >= 5]
    expected = [probs[cell] * num_outputs for cell in common]
    found = [counts[cell] for cell in common]
    if len(common) < len(probs):
        expected.append(num_outputs - sum(expected))
        found.append(num_outputs - sum(found))
    return float(chisquare(found, expected).pvalue)


def sample(
    config: SchedulerConfig,
    params: dict[str, Any],
    *,
    table: StepTable = MODERATE,
    skill: float = 0.6,
    confidence: Any = honest_confidence,
    gamma: int = 4,
    draft_vocab: tuple[int, ...] | None = None,
    duplicates: bool = False,
    eos: tuple[int, ...] = (),
    num_samples: int = NUM_SAMPLES,
    fused: bool = False,
    lookup: LookupAcceptance | None = None,
    has_drafter: bool = True,
    keeps_trajectories: bool = False,
    at_once: bool = False,
) -> list[tuple[int, ...]]:
    """Outputs of `num_samples` requests with seeds 0, 1, 2 …, among others that only make rows and loads change.

    duplicates: every request has a second one of the same seed, prompt and length beside it, whose output is not
    counted. fused: a step engine drafts, selects and verifies. at_once: an engine accepts, all slots in one call.
    lookup: drafts may be copied from a request's own text; keeps_trajectories: and be taken from what the target said
    of rejected ones.
    """
    target = ToyTarget(LANGUAGE, LIMITS)
    drafter = ToyDrafter(LANGUAGE, LIMITS, gamma=gamma, skill=skill, confidence=confidence, draft_vocab=draft_vocab)
    step_engine = ToyStepEngine(target, drafter) if fused else None
    drafts = drafter if has_drafter else None
    vocabulary = None if draft_vocab is None else np.array(draft_vocab)
    engine = open_acceptance(4, gamma + 1, max_requests=LIMITS.max_requests, draft_vocab=vocabulary)
    acceptance = AcceptanceOfArrays(engine) if at_once else None
    loop = make_loop(
        target,
        drafts,
        config,
        table=table,
        eos_token_ids=eos,
        step_engine=step_engine,
        acceptance=acceptance,
        lookup=lookup,
        keeps_trajectories=keeps_trajectories,
    )
    requests = []
    for seed in range(num_samples):
        counted = SamplingParams(seed=seed, **params)
        requests.append(GenerationRequest(request_id=f"counted-{seed}", prompt_ids=PROMPT, sampling=counted))
        if duplicates:
            requests.append(GenerationRequest(request_id=f"duplicate-{seed}", prompt_ids=PROMPT, sampling=counted))
        if seed % 3 == 0:
            other = SamplingParams(max_tokens=1 + seed % 7, temperature=(0.0, 1.5)[seed % 2], seed=seed)
            prompt = tuple((seed + at) % 4 for at in range(1 + seed % 5))
            requests.append(GenerationRequest(request_id=f"other-{seed}", prompt_ids=prompt, sampling=other))
    outputs = run(loop, requests)
    assert loop.totals.num_rows_moved > num_samples / 10, "slots churn"
    if config.mode != "off":
        assert loop.totals.num_drafts_verified > 0
    if acceptance is not None:
        assert acceptance.num_calls > 0
    if lookup is not None:
        assert loop.totals.num_requests_looking_up > 0
    if step_engine is not None:
        assert step_engine.num_calls["draft_and_verify"] == drafter.num_calls["draft"], "the step engine drafts, always"
    return [tuple(outputs[f"counted-{seed}"].token_ids) for seed in range(num_samples)]


def assert_lossless(config: SchedulerConfig, params: dict[str, Any], **options: Any) -> None:
    exact = sequence_probs(LANGUAGE, PROMPT, SamplingParams(**params), options.get("eos", ()))
    assert smallest_pvalue(sample(config, params, **options), exact) > FALSE_FAILURE / params["max_tokens"]
