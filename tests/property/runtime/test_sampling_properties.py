"""The shortcuts of the sampling code (candidates instead of a full sort, sparse edits) change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.runtime.request import SamplingParams
from dspark_trt.runtime.sampling import LogitProcessors, draw, residual_weights, target_probs
from tests.support.runtime_reference import next_token_probs

VOCAB_SIZE, EOS = 12, 5
TOKENS = st.integers(0, VOCAB_SIZE - 1)
# multiples of 1/4: ties are common, and no probability lies within rounding of a limit by accident of float32
LOGITS = st.integers(-24, 24).map(lambda quarter: quarter / 4)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB_SIZE + 2),
    top_p=st.sampled_from([0.001, 0.313, 0.707, 0.901, 1.0]),
    min_p=st.sampled_from([0.0, 0.0517, 0.303]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 2.0]), max_size=3),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    min_tokens=st.integers(0, 4),
)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    logits=st.lists(LOGITS, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    generated=st.lists(TOKENS, max_size=6),
    params=PARAMS,
)
def test_target_probs_equal_the_plain_reference(
    logits: list[float], prompt: list[int], generated: list[int], params: SamplingParams
) -> None:
    row = np.array([logits], dtype=np.float32)
    processors = LogitProcessors(params, np.array(prompt, dtype=np.int64), [EOS])
    for token in generated:
        processors.push(token)
    if processors.has_edits:
        processors.edit(row[0])
    expected = next_token_probs(np.array(logits, dtype=np.float32), prompt, generated, params, [EOS])
    np.testing.assert_allclose(target_probs(row, [params])[0], expected, rtol=1e-5, atol=1e-7)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(data=st.data(), uniform=st.floats(0, 1 - 2**-52))
def test_a_draw_has_weight_and_is_the_inverse_of_the_distribution(data: Any, uniform: float) -> None:
    weights = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.0, 1e-6, 0.5, 1.0]), min_size=2, max_size=9)))
    weights[data.draw(st.integers(0, len(weights) - 1))] = 1.0
    token = draw(weights.astype(np.float32)[None, :], [uniform])[0]
    assert weights[token] > 0
    below = float(weights.astype(np.float32)[:token].sum(dtype=np.float64))
    total = float(weights.astype(np.float32).sum(dtype=np.float64))
    assert below <= uniform * total * (1 + 1e-12) + 1e-12


@settings(max_examples=200, derandomize=True, deadline=None)
@given(data=st.data())
def test_accepting_or_replacing_a_draft_gives_the_target_distribution_exactly(data: Any) -> None:
    """sum over x of p_d(x) [accept x; else residual] = p_t, as algebra."""
    size = data.draw(st.integers(2, 6))
    weights = st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any)
    target, draft = (np.array(data.draw(weights), dtype=np.float64) for _ in range(2))
    target, draft = target / target.sum(), draft / draft.sum()
    accepted = np.minimum(target, draft)
    residual = residual_weights(target[None, :], draft[None, :])[0]
    output = accepted + (1 - accepted.sum()) * residual / residual.sum()
    np.testing.assert_allclose(output, target, atol=1e-7)
