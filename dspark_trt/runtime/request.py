"""What a client may ask for, and the check of it.

A request is plain data. Its checks are in `validate`, called once by `DecodingLoop.submit`, so that nothing malformed
reaches a step. Where a request stands on its way through the loop is `runtime/state.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspark_trt.errors import RequestError, abridged

MAX_LOG_PROBS = 20  # alternatives reported for one token
MAX_LOGIT_BIAS = 1_000_000  # bans or forces a token for certain, and float32 keeps the order of the others
MAX_SEED = 2**64 - 1
MAX_SALT_CHARACTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target's distribution is shaped and where generation ends.

    Everything here acts on the target's distribution, for drafts that are verified as for tokens that are drawn.
    The processors follow the order and the meaning of Hugging Face transformers (see `runtime/sampling.py`).
    """

    max_tokens: int = 128  # tokens to generate, EOS included; cut to what the KV row can hold
    min_tokens: int = 0  # EOS and stop_token_ids are masked, stop strings are not looked for, before so many tokens
    temperature: float = 0.0  # 0: argmax; values below 1e-5 count as 0
    top_k: int = 0  # 0: off; tokens that tie with the k-th stay
    top_p: float = 1.0  # 1: off; among equal probabilities the lower token id stays
    min_p: float = 0.0  # 0: off; relative to the most probable token
    seed: int | None = None  # None: a random one
    repetition_penalty: float = 1.0  # prompt and generated tokens; divides positive logits, multiplies negative ones
    presence_penalty: float = 0.0  # generated tokens; subtracted once
    frequency_penalty: float = 0.0  # generated tokens; subtracted for every occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    stop_strings: tuple[str, ...] = ()  # the text ends before the first of them
    include_stop_string: bool = False  # ... or behind it
    stop_token_ids: tuple[int, ...] = ()  # end the request like EOS
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # leave them out of the text
    num_log_probs: int | None = None  # None: no log probabilities; n: the token's own and those of the n most probable


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate."""

    request_id: str  # unique among the requests that are not finished
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    sequence_index: int = 0  # tells apart the sequences that a client wants of one prompt and seed
    max_verify_len: int | None = None  # drafts verified in one step at most; 0: decode this request without drafts
    cache_salt: str = ""  # K/V are shared only between requests whose salts are equal


def validate(request: GenerationRequest, *, vocab_size: int, max_seq_len: int) -> None:
    """Raises RequestError that names the first field that is not acceptable."""
    _check_prompt(request, vocab_size, max_seq_len)
    params = request.sampling
    for name, (kind, is_acceptable, expected) in _FIELD_RULES.items():
        value = getattr(params, name)
        if not (_is_number(value, kind) and is_acceptable(value)):
            raise _refusal(name, expected, value)
    if params.min_tokens > params.max_tokens:
        raise _refusal("min_tokens", f"at most max_tokens = {params.max_tokens}", params.min_tokens)
    if params.seed is not None and not (_is_number(params.seed, int) and 0 <= params.seed <= MAX_SEED):
        raise _refusal("seed", f"an integer in 0..{MAX_SEED}", params.seed)
    if params.num_log_probs is not None and not (
        _is_number(params.num_log_probs, int) and 0 <= params.num_log_probs <= MAX_LOG_PROBS
    ):
        raise _refusal("num_log_probs", f"an integer in 0..{MAX_LOG_PROBS}", params.num_log_probs)
    for token_id, bias in params.logit_bias.items():
        _check_token("logit_bias", token_id, vocab_size)
        if not (_is_number(bias, float) and abs(bias) <= MAX_LOGIT_BIAS):
            raise _refusal(f"logit_bias[{token_id}]", f"a number in [-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]", bias)
    for token_id in params.stop_token_ids:
        _check_token("stop_token_ids", token_id, vocab_size)
    for sequence in params.bad_words:
        if not sequence:
            raise _refusal("bad_words", "sequences of at least one token id", sequence)
        for token_id in sequence:
            _check_token("bad_words", token_id, vocab_size)
    for stop in params.stop_strings:
        if not (isinstance(stop, str) and stop):
            raise _refusal("stop_strings", "strings that are not empty", stop)


def _check_prompt(request: GenerationRequest, vocab_size: int, max_seq_len: int) -> None:
    if not (isinstance(request.request_id, str) and request.request_id):
        raise _refusal("request_id", "a string that is not empty", request.request_id)
    if not request.prompt_ids:
        raise RequestError("prompt_ids: the prompt is empty, expected at least one token; send some text")
    if len(request.prompt_ids) > max_seq_len:
        raise RequestError(
            f"prompt_ids: the prompt has {len(request.prompt_ids)} tokens, at most {max_seq_len} fit; "
            "shorten it, or build the engines with a larger max_seq_len"
        )
    _check_tokens("prompt_ids", request.prompt_ids, vocab_size)
    if not (_is_number(request.sequence_index, int) and 0 <= request.sequence_index < 2**32):
        raise _refusal("sequence_index", "an integer in 0..2^32-1", request.sequence_index)
    verify_len = request.max_verify_len
    if verify_len is not None and not (_is_number(verify_len, int) and verify_len >= 0):
        raise _refusal("max_verify_len", "an integer >= 0", verify_len)
    salt = request.cache_salt
    if not (isinstance(salt, str) and len(salt) <= MAX_SALT_CHARACTERS):
        raise _refusal("cache_salt", f"a string of at most {MAX_SALT_CHARACTERS} characters", salt)


# field -> (type, test, what is expected)
_FIELD_RULES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_tokens": (int, lambda value: value >= 1, "an integer >= 1"),
    "min_tokens": (int, lambda value: value >= 0, "an integer >= 0"),
    "temperature": (float, lambda value: 0.0 <= value <= 100.0, "a number in [0, 100]"),
    "top_k": (int, lambda value: value >= 0, "an integer >= 0 (0: off)"),
    "top_p": (float, lambda value: 0.0 < value <= 1.0, "a number in (0, 1]"),
    "min_p": (float, lambda value: 0.0 <= value <= 1.0, "a number in [0, 1]"),
    "repetition_penalty": (float, lambda value: 0.01 <= value <= 100.0, "a number in [0.01, 100]"),
    "presence_penalty": (float, lambda value: -2.0 <= value <= 2.0, "a number in [-2, 2]"),
    "frequency_penalty": (float, lambda value: -2.0 <= value <= 2.0, "a number in [-2, 2]"),
}


def _is_number(value: Any, kind: type) -> bool:
    accepted = (int, float) if kind is float else (int,)
    return isinstance(value, accepted) and not isinstance(value, bool)


def _check_token(name: str, token_id: Any, vocab_size: int) -> None:
    if not (_is_number(token_id, int) and 0 <= token_id < vocab_size):
        raise _refusal(name, f"token ids in 0..{vocab_size - 1}", token_id)


def _check_tokens(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """As `_check_token` for each, in a hundredth of the time: a long prompt must not hold up a step."""
    ids = np.asarray(token_ids)
    if ids.dtype == np.int64 and ids.ndim == 1 and ids.min() >= 0 and ids.max() < vocab_size:
        return
    for token_id in token_ids:
        _check_token(name, token_id, vocab_size)


def _refusal(name: str, expected: str, found: Any) -> RequestError:
    return RequestError(
        f"{name}: expected {expected}, found {abridged(found)}; correct this field and send the request again"
    )
