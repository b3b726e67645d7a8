"""MarkovHead in NumPy: the definition that the ONNX function body and the GPU kernel are held against.

Shape letters: `R` requests, `G` gamma, `V` vocabulary, `D` hidden, `r` Markov rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from dspark_trt_plugins.markov_head.form import EXCLUDED_LOGIT, LARGEST_LOGIT, MarkovHeadForm
from numpy.typing import NDArray

Weights = Mapping[str, NDArray[Any]]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class MarkovHeadOutput:
    draft_ids: NDArray[np.int64]  # [R, G], always in [0, V)
    draft_logits: NDArray[np.float32]  # [R, G, V], finite: what was drawn from, before the temperature
    confidence_logits: NDArray[np.float32] | None  # [R, G]; None without a confidence head


def markov_head(
    form: MarkovHeadForm,
    weights: Weights,
    *,
    base_logits: Array,
    hidden: Array,
    anchor_ids: Array,
    temperatures: Array,
    uniforms: Array,
) -> MarkovHeadOutput:
    """Draft gamma tokens one after the other, each under the transition bias of the one before.

    Args:
        weights: by canonical checkpoint name, `form.weight_names`.
        base_logits: [R, G, V] float32, lm_head of `hidden`.
        hidden: [R, G, D], backbone output of every slot after the final norm.
        anchor_ids: [R], the token before the first draft; one that W1 has no row for is the nearest that it has.
        temperatures: [R], 0 = argmax.
        uniforms: [R, G] in [0, 1), one draw each.

    Source: paper section 3.1, eq. 4-7. Sums are float64; what is handed out is float32.
    """
    hidden = hidden.astype(np.float64)
    is_candidate = candidates(base_logits, form.top_n) if form.top_n else np.ones(base_logits.shape, bool)
    state = np.zeros((len(anchor_ids), form.markov_rank))
    previous = anchor_ids
    if form.has_markov_head:  # an id that is none is the nearest one that is
        previous = np.clip(anchor_ids, 0, len(weights["markov_head.markov_w1.weight"]) - 1)
    ids, logits, confidences = [], [], []
    for slot in range(form.gamma):
        slot_hidden = hidden[:, slot]
        slot_logits = base_logits[:, slot].astype(np.float64)
        embedded = np.zeros((len(anchor_ids), 0))
        if form.has_markov_head:
            embedded = weights["markov_head.markov_w1.weight"][previous].astype(np.float64)
            feature, state = _bias_feature(form, weights, slot_hidden, embedded, state)
            slot_logits = slot_logits + feature @ weights["markov_head.markov_w2.weight"].astype(np.float64).T
        if form.has_confidence_head:
            confidences.append(_confidence_logit(form, weights, slot_hidden, embedded))
        logits.append(np.where(is_candidate[:, slot], finite_logits(slot_logits), np.float32(EXCLUDED_LOGIT)))
        previous = draw(logits[-1], temperatures, uniforms[:, slot])
        ids.append(previous)
    return MarkovHeadOutput(
        draft_ids=np.stack(ids, axis=1),
        draft_logits=np.stack(logits, axis=1),
        confidence_logits=np.stack(confidences, axis=1).astype(np.float32) if confidences else None,
    )


def _bias_feature(
    form: MarkovHeadForm, weights: Weights, hidden: Array, embedded: Array, state: Array
) -> tuple[Array, Array]:
    """What W2 turns into the transition bias, [R, r], and the next recurrent state (unchanged but for rnn)."""
    if form.head_type == "vanilla":
        return embedded, state
    if form.head_type == "gated":
        gate = _sigmoid(_linear(weights, "markov_head.gate_proj", np.concatenate([hidden, embedded], axis=1)))
        return gate * embedded, state
    joint = _linear(weights, "markov_head.joint_proj", np.concatenate([state, embedded, hidden], axis=1))
    gate, candidate, out = np.split(joint, 3, axis=1)
    gate = _sigmoid(gate)
    return np.tanh(out), gate * state + (1 - gate) * np.tanh(candidate)


def _confidence_logit(form: MarkovHeadForm, weights: Weights, hidden: Array, embedded: Array) -> Array:
    """[R]: scores draft x_j and sees x_{j-1} through `embedded`, never x_j."""
    features = np.concatenate([hidden, embedded], axis=1) if form.is_confidence_with_markov else hidden
    return _linear(weights, "confidence_head.proj", features)[:, 0]


def _linear(weights: Weights, name: str, features: Array) -> Array:
    product: Array = features @ weights[f"{name}.weight"].astype(np.float64).T
    bias = weights.get(f"{name}.bias")
    return product if bias is None else product + bias.astype(np.float64)


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))  # cannot overflow


def finite_logits(logits: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Float32 logits within +-LARGEST_LOGIT; NaN becomes the smallest, so that it is never preferred."""
    clipped = np.clip(np.where(np.isnan(logits), -LARGEST_LOGIT, logits), -LARGEST_LOGIT, LARGEST_LOGIT)
    return clipped.astype(np.float32)


def candidates(base_logits: Array, top_n: int) -> NDArray[np.bool_]:
    """Where the top_n largest of the last axis are, equal ones by lowest index; it does not depend on any draft."""
    order = np.argsort(-finite_logits(base_logits), axis=-1, kind="stable")
    is_candidate = np.zeros(base_logits.shape, bool)
    np.put_along_axis(is_candidate, order[..., :top_n], True, axis=-1)
    return is_candidate


def draw(logits: NDArray[np.float32], temperatures: Array, uniforms: Array) -> NDArray[np.int64]:
    """Token ids [R] from logits [R, V]: inverse-CDF of softmax(logits / temperature); argmax at temperature 0.

    The id is the first whose cumulative probability exceeds the uniform; equal largest logits: the lowest id.
    """
    greedy = logits.argmax(axis=1)
    scaled = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    weights = np.exp(scaled / np.where(temperatures > 0, temperatures, 1)[:, None])
    cumulative = weights.cumsum(axis=1)
    # the last partial sum is above every uniform's share, so the count stays below V
    sampled = (cumulative <= uniforms.astype(np.float64)[:, None] * cumulative[:, -1:]).sum(axis=1)
    ids: NDArray[np.int64] = np.where(temperatures > 0, sampled, greedy)
    return ids
