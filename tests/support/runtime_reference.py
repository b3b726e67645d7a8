"""A target distribution written the plain way: float64, one token at a time, whole vocabulary, no shortcuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dspark_trt.runtime.request import SamplingParams
from tests.support.toy_engines import ToyLanguage


def next_token_probs(
    logits: np.ndarray, prompt: Sequence[int], generated: Sequence[int], params: SamplingParams, ending: Sequence[int]
) -> np.ndarray:
    """p_t of the token behind prompt + generated, [V]."""
    scores = logits.astype(np.float64)
    counts = Counter(generated)
    for token in range(len(scores)):
        if token in prompt or token in counts:
            penalty = params.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        scores[token] -= params.presence_penalty * (counts[token] > 0) + params.frequency_penalty * counts[token]
        scores[token] += params.logit_bias.get(token, 0.0)
    text = [*prompt, *generated]
    for *beginning, last in params.bad_words:
        if text[len(text) - len(beginning) :] == beginning:
            scores[last] = -np.inf
    if len(generated) < params.min_tokens:
        scores[list(ending)] = -np.inf
    probs = np.zeros(len(scores))
    if params.temperature < 1e-5:
        probs[int(np.argmax(scores))] = 1.0
        return probs
    weights = np.exp((scores - scores.max()) / params.temperature)
    if params.top_k:
        weights[weights < np.sort(weights)[-min(params.top_k, len(weights))]] = 0.0
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    before, total = 0.0, weights.sum()
    for token in order:
        if before / total >= params.top_p:
            weights[token] = 0.0
        before += weights[token]
    weights[weights < params.min_p * weights.max()] = 0.0
    return weights / weights.sum()


def sequence_probs(
    language: ToyLanguage, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()
) -> dict[tuple[int, ...], float]:
    """The exact probability of every output of a request: max_tokens tokens, or fewer that end with EOS."""
    ending = [] if params.ignore_eos else [*eos, *params.stop_token_ids]
    complete: dict[tuple[int, ...], float] = {}
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for sequence, prob in growing.items():
            probs = next_token_probs(language.logits([*prompt, *sequence]), prompt, sequence, params, ending)
            for token in np.flatnonzero(probs):
                extended = (*sequence, int(token))
                (complete if token in ending else longer)[extended] = prob * probs[token]
        growing = longer
    return complete | growing
