"""Acceptance in NumPy, row by row: the definition that the GPU kernels are held against.

It means what `dspark_trt/runtime/acceptance.py` does, slot by slot and in floats; here all slots are computed at once,
and masses are integers, so that sums do not depend on their order. Shape letters: `V` vocabulary, `W` draft vocabulary;
others as in `launches.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from dspark_trt_plugins.acceptance.form import (
    ACCEPTED,
    ALL_MASKED,
    MASKED_LOGIT,
    MASS_BITS,
    MAX_TOP,
    NOT_FINITE,
    NOT_REACHED,
    PROB_BITS,
    RESIDUAL_MASS_EPSILON,
    AcceptanceForm,
)
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]


def acceptance(form: AcceptanceForm, inputs: Arrays) -> dict[str, Array]:
    """Outputs by name, of the inputs of `launches.py`; nothing is changed. Source: paper section 2.1."""
    rows = [_Row.of(form, inputs, row) for row in range(len(inputs["logit_rows"]))]
    outcomes = np.full(len(rows), NOT_REACHED, np.int64)
    for at, row in enumerate(rows):
        before = outcomes[int(inputs["first_rows"][at]) : at]
        if (before == ACCEPTED).all():
            outcomes[at] = _decide(row)
    reported = inputs["reported_rows"].tolist()
    shape = len(reported), MAX_TOP
    log_probs, top_ids, top = np.zeros(shape[0], np.float32), np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for place, at in enumerate(reported):
        token = int(inputs["draft_ids"][at] if outcomes[at] == ACCEPTED else outcomes[at])
        log_probs[place], top_ids[place], top[place] = _report(inputs["logits"][inputs["logit_rows"][at]], token)
    return {"outcomes": outcomes, "log_probs": log_probs, "top_ids": top_ids, "top_log_probs": top}


@dataclass(frozen=True, slots=True)
class _Row:
    """One slot of one block."""

    logits: Array  # [V], edited
    is_finite: bool
    draft: int  # -1: none
    draft_weights: Array | None  # [V]; None: the draft is an argmax
    temperature: np.float32
    top_k: int
    top_p: np.float32
    min_p: np.float32
    uniforms: tuple[float, float, float]  # accept, residual, bonus

    @classmethod
    def of(cls, form: AcceptanceForm, inputs: Arrays, row: int) -> _Row:
        raw = inputs["logits"][inputs["logit_rows"][row]]
        words = (inputs[f"{name}_words"][row] for name in ("accept", "residual", "bonus"))
        accept, residual, bonus = (float((int(word) >> 12) & (2**52 - 1)) * 2.0**-52 for word in words)
        return cls(
            logits=edited(inputs, row),
            is_finite=bool(np.isfinite(raw).all()),
            draft=int(inputs["draft_ids"][row]),
            draft_weights=_draft_weights(form, inputs, row) if inputs["draws"][row] >= 0 else None,
            temperature=inputs["temperatures"][row],
            top_k=int(inputs["top_k"][row]),
            top_p=inputs["top_p"][row],
            min_p=inputs["min_p"][row],
            uniforms=(accept, residual, bonus),
        )


def edited(inputs: Arrays, row: int) -> Array:
    """Logits [V] of a row with its penalties, biases and masks; the drafts before it count as generated."""
    logits = np.array(inputs["logits"][inputs["logit_rows"][row]])
    part = slice(int(inputs["edit_begins"][row]), int(inputs["edit_ends"][row]))
    ids, slot, first = inputs["edit_ids"][part], int(inputs["slots"][row]), int(inputs["first_rows"][row])
    counts = inputs["edit_counts"][part].copy()
    for draft in inputs["draft_ids"][first : first + slot]:
        counts += ids == draft
    is_seen = (inputs["edit_is_seen"][part] != 0) | (counts > 0)
    repetition = inputs["repetition_penalties"][row]
    with np.errstate(invalid="ignore", over="ignore"):
        raw = logits[ids]
        values = np.where(is_seen, np.where(raw > 0, raw / repetition, raw * repetition), raw)
        values -= inputs["presence_penalties"][row] * (counts > 0) + inputs["frequency_penalties"][row] * counts
        values += inputs["edit_bias"][part]
    logits[ids] = np.where((inputs["edit_masks"][part] >> slot) & 1 == 1, np.float32(MASKED_LOGIT), values)
    return logits


def weights_of(logits: Array, temperature: np.float32) -> Array:
    """exp((logits - largest) / temperature), float32; the largest weight is 1."""
    with np.errstate(over="ignore"):
        weights: Array = np.exp((logits - logits.max()) / temperature)
    return weights


def as_mass(weights: Array) -> Array:
    return np.asarray(weights.astype(np.float64) * 2.0**MASS_BITS).astype(np.int64)


def kept(weights: Array, top_k: int, top_p: np.float32, min_p: np.float32) -> Array:
    """Which tokens [V] top_k, top_p and min_p keep, in this order: ties stay with top_k, go by id with top_p."""
    is_kept = np.ones(len(weights), bool)
    if 0 < top_k < len(weights):
        is_kept = weights >= np.sort(weights)[-top_k]
    if top_p < 1.0:
        masses = np.where(is_kept, as_mass(weights), 0)
        order = np.lexsort((np.arange(len(weights)), -weights.astype(np.float64)))
        before = np.cumsum(masses[order]) - masses[order]
        wanted = max(int(np.ceil(float(top_p) * float(masses.sum()))), 1)
        is_kept[order[before >= wanted]] = False
    return is_kept & (weights >= min_p)


def _draft_weights(form: AcceptanceForm, inputs: Arrays, row: int) -> Array:
    """[V]; zeros where the logits are not usable: nothing was proposed then."""
    logits = inputs["draft_logits"][inputs["draft_rows"][row]]
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return np.zeros(form.vocab_size, np.float32)
    weights = weights_of(logits, inputs["draft_temperatures"][row])
    if not form.draft_vocab_size:
        return weights
    columns = inputs["draft_columns"]
    return np.where(columns >= 0, weights[columns], np.float32(0.0))


def _decide(row: _Row) -> int:
    if not row.is_finite:
        return NOT_FINITE
    if row.logits.max() <= np.float32(MASKED_LOGIT):
        return ALL_MASKED
    accept, residual, bonus = row.uniforms
    p_t = _target_probs(row)
    p_d = np.zeros(len(p_t))
    if row.draft >= 0:
        if row.draft_weights is None:
            p_d[row.draft] = 1.0
        elif row.draft_weights.any():
            p_d = row.draft_weights.astype(np.float64) * 2.0**MASS_BITS / float(as_mass(row.draft_weights).sum())
        if p_d[row.draft] > 0:
            if accept * p_d[row.draft] < p_t[row.draft]:
                return ACCEPTED
            excess = _as_prob_mass(np.maximum(p_t - p_d, 0.0))
            if excess.sum() > int(RESIDUAL_MASS_EPSILON * 2**PROB_BITS):
                return _draw(excess, residual)
            return _draw(_as_prob_mass(p_t), residual)
    return _draw(_as_prob_mass(p_t), bonus)


def _target_probs(row: _Row) -> Array:
    """float64 [V]"""
    if row.temperature == 0:
        p_t = np.zeros(len(row.logits))
        p_t[row.logits.argmax()] = 1.0
        return p_t
    weights = weights_of(row.logits, row.temperature)
    is_kept = kept(weights, row.top_k, row.top_p, row.min_p)
    mass = float(as_mass(weights)[is_kept].sum())
    return np.where(is_kept, weights.astype(np.float64) * 2.0**MASS_BITS / mass, 0.0)


def _as_prob_mass(probs: Array) -> Array:
    return np.asarray(probs * 2.0**PROB_BITS).astype(np.int64)


def _draw(masses: Array, uniform: float) -> int:
    whole = int(masses.sum())
    position = min(int(uniform * float(whole)), whole - 1)
    return int(np.searchsorted(np.cumsum(masses), position, side="right"))


def _report(raw: Array, token: int) -> tuple[np.float32, Array, Array]:
    """Log-softmax of the token (0 where it is none), and ids and log-softmax of the largest logits, ties by id."""
    largest = raw.max()
    with np.errstate(invalid="ignore"):
        total = largest + np.log(np.exp(raw - largest).sum())
    ids = np.lexsort((np.arange(len(raw)), -raw))[:MAX_TOP]
    missing = MAX_TOP - len(ids)
    log_prob = raw[token] - total if token >= 0 else np.float32(0.0)
    return log_prob, np.pad(ids, (0, missing)), np.pad(raw[ids] - total, (0, missing), constant_values=-np.inf)
