"""The target distribution p_t of a request, and draws from it.

Shape letters: `A` rows (requests that are still in their block), `V` vocabulary. Rows belong to the array library of
the engine; the same code runs on numpy and torch.

Order and meaning of the processors (as in Hugging Face transformers where it has them):
    1 repetition_penalty     prompt and generated tokens; logit / penalty if positive, else logit * penalty
    2 presence, frequency    generated tokens (OpenAI): logit - presence * (count > 0) - frequency * count
    3 logit_bias             added
    4 bad_words              the last token of a sequence whose other tokens end the text so far: -inf
    5 min_tokens             EOS and stop_token_ids: -inf until that many tokens are generated
    6 temperature            logits / temperature; 0: all mass on the largest logit, the lowest id on ties
    7 top_k                  logits below the k-th largest have no mass
    8 top_p                  tokens are kept from the most probable on, up to and with the one that reaches top_p
    9 min_p                  tokens less probable than min_p times the most probable have no mass
Generated tokens are all tokens before the one that is drawn, so drafts that were accepted in this block count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from dspark_trt.errors import RequestError
from dspark_trt.runtime.arrays import index_array, largest, take_rows, to_host
from dspark_trt.runtime.request import SamplingParams
from dspark_trt.runtime.truncation import truncate

Array = Any  # of the engine's library
TopLogProbs = tuple[tuple[int, float], ...]  # (token id, log probability), most probable first

ALL_MASKED_ERROR = "bad_words and min_tokens: together they mask every token of the vocabulary; mask fewer"
MIN_TEMPERATURE = 1e-5  # below it a request counts as greedy
RESIDUAL_MASS_EPSILON = 1e-8  # below it draft and target distribution are equal up to rounding


class LogitProcessors:
    """Processors 1 to 5 of one request: edits of few logits, with the token counts that they need.

    `push` follows every token of the request, so that `edit` always sees the text so far.
    """

    def __init__(self, params: SamplingParams, prompt_ids: NDArray[np.int64], ending_ids: Sequence[int]) -> None:
        self.params = params
        self.tokens = prompt_ids.tolist()
        self._num_prompt_tokens = len(self.tokens)
        self.has_penalties = params.repetition_penalty != 1.0 or bool(
            params.presence_penalty or params.frequency_penalty
        )
        seen = np.unique(prompt_ids) if params.repetition_penalty != 1.0 else prompt_ids[:0]
        self._seen_ids = np.concatenate((seen, np.zeros(params.max_tokens * self.has_penalties, dtype=np.int64)))
        self._seen_counts = np.zeros(len(self._seen_ids), dtype=np.float32)  # among the generated tokens
        # of the ids above
        self.place_of_seen = {token_id: index for index, token_id in enumerate(seen.tolist())}
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._ending_ids = np.array(sorted(ending_ids) if params.min_tokens else [], dtype=np.int64)
        self.has_edits = bool(self.has_penalties or params.logit_bias or params.bad_words or params.min_tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self._num_prompt_tokens

    @property
    def seen(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids that penalties look at, and how often each was generated."""
        return self._seen_ids[: len(self.place_of_seen)], self._seen_counts[: len(self.place_of_seen)]

    @property
    def ending_ids(self) -> list[int]:
        """That min_tokens masks; none without it."""
        ids: list[int] = self._ending_ids.tolist()
        return ids

    def push(self, token_id: int) -> None:
        """A token was generated."""
        self.tokens.append(token_id)
        if self.has_penalties:
            index = self.place_of_seen.setdefault(token_id, len(self.place_of_seen))
            self._seen_ids[index] = token_id
            self._seen_counts[index] += 1

    def edit(self, row: Array) -> None:
        """Apply processors 1 to 5 to the logits [V] of the next token, in place.

        Raises RequestError when no token is left.
        """
        xp = array_namespace(row)

        def like_row(values: NDArray[Any]) -> Array:
            return xp.asarray(values, device=device(row))

        if self.has_penalties:
            params, num_seen = self.params, len(self.place_of_seen)
            ids = like_row(self._seen_ids[:num_seen])
            counts = self._seen_counts[:num_seen]
            logits = row[ids]
            logits = xp.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            subtracted = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
            row[ids] = logits - like_row(subtracted.astype(np.float32))
        if len(self._bias_ids):
            ids = like_row(self._bias_ids)
            row[ids] = row[ids] + like_row(self._bias)
        for sequence in self.params.bad_words:
            beginning = list(sequence[:-1])
            if not beginning or self.tokens[-len(beginning) :] == beginning:
                row[sequence[-1]] = -xp.inf
        if len(self._ending_ids) and self.num_generated < self.params.min_tokens:
            row[like_row(self._ending_ids)] = -xp.inf
        # nothing else masks; on a device this waits for the row
        if (self.params.bad_words or len(self._ending_ids)) and float(xp.max(row)) == -xp.inf:
            raise RequestError(ALL_MASKED_ERROR)


def is_greedy(temperature: float) -> bool:
    """Whether tokens are the argmax instead of draws."""
    return temperature < MIN_TEMPERATURE


def target_probs(logits: Array, params: Sequence[SamplingParams]) -> Array:
    """p_t of each row from its edited logits (processors 6 to 9); a row sums to 1. [A, V] float32"""
    xp = array_namespace(logits)
    if all(is_greedy(each.temperature) for each in params):
        return point_masses(logits)
    weights = softmax_weights(logits, [each.temperature for each in params])
    truncate(weights, [None if is_greedy(each.temperature) else each for each in params])
    greedy = [row for row, each in enumerate(params) if is_greedy(each.temperature)]
    if greedy:
        weights[index_array(greedy, weights), :] = point_masses(take_rows(logits, greedy))
    return weights / xp.sum(weights, axis=-1, keepdims=True)


def softmax_weights(logits: Array, temperatures: Sequence[float]) -> Array:
    """exp((logits - max) / temperature): softmax without its denominator; the largest weight of a row is 1. [A, V]

    Rows of temperature 0 are computed at temperature 1, for the caller to replace.
    """
    xp = array_namespace(logits)
    divisors = xp.asarray(
        [[temperature or 1.0] for temperature in temperatures],
        dtype=logits.dtype,
        device=device(logits),
    )
    return xp.exp((logits - xp.max(logits, axis=-1, keepdims=True)) / divisors)


def residual_weights(target_probs: Array, draft_probs: Array, draft_vocab: NDArray[np.int64] | None = None) -> Array:
    """max(p_t - p_d, 0), not normalised; p_t where next to nothing is left of it. [A, V] (paper section 2.1)

    draft_probs [A, W] over the target ids draft_vocab [W]; None: over all, W = V.
    """
    xp = array_namespace(target_probs)
    if draft_vocab is None:
        excess = xp.clip(target_probs - draft_probs, 0.0, None)
    else:
        ids = index_array(draft_vocab, target_probs)
        excess = xp.asarray(target_probs, copy=True)
        excess[:, ids] = xp.clip(xp.take(target_probs, ids, axis=1) - draft_probs, 0.0, None)
    mass = xp.sum(excess, axis=-1, keepdims=True)
    return xp.where(mass > RESIDUAL_MASS_EPSILON, excess, target_probs)


def draw(weights: Array, uniforms: Sequence[float]) -> list[int]:
    """One token of each row of weights [A, V] by inverse CDF; rows need not be normalised."""
    xp = array_namespace(weights)
    cumulative = xp.cumulative_sum(weights, axis=-1, dtype=xp.float64)
    points = xp.asarray(uniforms, dtype=xp.float64, device=device(weights)) * cumulative[:, -1]
    token_ids: list[int] = to_host(xp.sum(cumulative <= points[:, None], axis=-1, dtype=xp.int64)).tolist()
    return token_ids


def log_probs(logits: Array, token_id: int, num_alternatives: int) -> tuple[float, TopLogProbs]:
    """Raw log-softmax of one row [V]: of `token_id`, and of the most probable tokens, ties by id."""
    xp = array_namespace(logits)
    highest = xp.max(logits)
    log_total = highest + xp.log(xp.sum(xp.exp(logits - highest)))
    of_token, total = to_host(xp.stack([logits[token_id], log_total])).tolist()
    alternatives: list[tuple[float, int]] = []
    if num_alternatives:
        smallest = largest(logits, min(num_alternatives, logits.shape[0]))[-1]
        ids = xp.nonzero(logits >= smallest)[0]
        found = zip((-to_host(logits[ids])).tolist(), to_host(ids).tolist(), strict=True)
        alternatives = sorted(found)[:num_alternatives]
    return of_token - total, tuple((each, -negated - total) for negated, each in alternatives)


def point_masses(logits: Array) -> Array:
    """1 at the largest logit of each row, the first on ties, 0 elsewhere. [A, V]"""
    xp = array_namespace(logits)
    probs = xp.zeros_like(logits)
    probs[xp.arange(logits.shape[0], device=device(logits)), xp.argmax(logits, axis=-1)] = 1.0
    return probs
