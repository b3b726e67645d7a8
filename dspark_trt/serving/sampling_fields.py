"""The fields of a request that say how its tokens are chosen and what ends them, as the runtime takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dspark_trt.serving.fields import Fields
from dspark_trt.serving.limits import (
    MAX_STOP_WORD_CHARACTERS,
    MAX_STOP_WORDS,
    check_bad_word_ids,
    check_count,
    check_logit_bias,
    check_stop_words,
)

Decode = Callable[[Sequence[int]], str]
_END_ID_OFF = -1  # nothing ends the text


def sampling_fields(fields: Fields, decode: Decode) -> dict[str, Any]:
    """Arguments of `SamplingParams`; None: not given. Raises RequestError that names the field that is not acceptable.

    `decode`: the text of token ids, special tokens left out.
    """
    stop_words, stop_token_ids = _stop_words(fields, decode)
    end_id = fields.integer("end_id")  # replaces the checkpoint's own EOS ids
    if end_id is not None and end_id < _END_ID_OFF:
        raise fields.refusal("end_id", "a token id, or -1: nothing ends the text", end_id)
    max_tokens = fields.integer("request_output_len")
    if max_tokens is None:
        raise fields.refusal("request_output_len", "the most tokens to generate, as every request must say", None)
    bad_words = fields.token_sequences("bad_words_list")
    check_bad_word_ids(bad_words)
    return {
        "max_tokens": max_tokens,
        "min_tokens": _min_tokens(fields),
        "temperature": fields.number("temperature"),
        "top_k": fields.integer("runtime_top_k"),
        "top_p": fields.number("runtime_top_p"),
        "min_p": fields.number("min_p"),
        "seed": fields.integer("seed"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "logit_bias": _logit_bias(fields),
        "bad_words": bad_words,
        "stop_strings": stop_words,
        "stop_token_ids": ((end_id,) if end_id is not None and end_id >= 0 else ()) + stop_token_ids,
        "ignore_eos": end_id is not None,
        "skip_special_tokens": fields.flag("skip_special_tokens"),
        "num_log_probs": _num_log_probs(fields),
    }


def _stop_words(fields: Fields, decode: Decode) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop strings, and stop token ids: of the sequences that are one token without text, a special one."""
    texts = list(fields.texts("stop_words", MAX_STOP_WORDS))
    check_stop_words(texts)
    sequences = fields.token_sequences("stop_words_list")
    check_count("stop_words_list", len(sequences), MAX_STOP_WORDS, "sequences")
    token_ids = []
    for ids in sequences:
        check_count("stop_words_list", len(ids), MAX_STOP_WORD_CHARACTERS, "token ids in a sequence")
        if min(ids) < 0:
            raise fields.refusal("stop_words_list", "token ids >= 0", ids)
        text = decode(ids)
        if text:
            texts.append(text)
        elif len(ids) == 1:
            token_ids.append(ids[0])
        else:
            raise fields.refusal("stop_words_list", "sequences with text, or of one special token", ids)
    return tuple(texts), tuple(token_ids)


def _num_log_probs(fields: Fields) -> int | None:
    """Alternatives to each token; None: no log probabilities at all."""
    num_alternatives = fields.integer("num_top_log_probs")
    if num_alternatives is None:
        return 0 if fields.flag("return_log_probs") else None
    return num_alternatives


def _min_tokens(fields: Fields) -> int | None:
    min_tokens, min_length = fields.integer("min_tokens"), fields.integer("min_length")
    if min_tokens is not None and min_length is not None and min_tokens != min_length:
        raise fields.refusal("min_length", f"the same as its other name, min_tokens = {min_tokens}", min_length)
    return min_length if min_tokens is None else min_tokens


def _logit_bias(fields: Fields) -> dict[int, float]:
    biases = fields.json_object("logit_bias")
    check_logit_bias(len(biases))
    try:
        return {int(token_id): float(bias) for token_id, bias in biases.items()}
    except (TypeError, ValueError, OverflowError):
        raise fields.refusal("logit_bias", "a JSON object of token ids and numbers", biases) from None
