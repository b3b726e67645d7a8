"""A request that is not acceptable is refused with the name of the field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dspark_trt.errors import RequestError
from dspark_trt.runtime.request import GenerationRequest, SamplingParams, validate

VOCAB_SIZE, MAX_SEQ_LEN = 100, 16


def check(prompt_ids: Any = (1, 2), *, request: dict[str, Any] | None = None, **sampling: Any) -> None:
    validate(
        GenerationRequest(
            **{"request_id": "a", "prompt_ids": prompt_ids, "sampling": SamplingParams(**sampling), **(request or {})}
        ),
        vocab_size=VOCAB_SIZE,
        max_seq_len=MAX_SEQ_LEN,
    )


def test_defaults_and_all_features_together_are_acceptable() -> None:
    check()
    check(
        max_tokens=5,
        min_tokens=5,
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=2**64 - 1,
        repetition_penalty=1.2,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -100, 99: 3.5},
        bad_words=((1,), (2, 3)),
        stop_strings=("END",),
        stop_token_ids=(7,),
        num_log_probs=20,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("num_log_probs", 21),
        ("num_log_probs", -1),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {1: float("inf")}),
        ("stop_token_ids", (-1,)),
        ("bad_words", ((),)),
        ("bad_words", ((1, 100),)),
        ("stop_strings", ("",)),
    ],
)
def test_the_refusal_names_the_sampling_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}"):
        check(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_id", ""),
        ("prompt_ids", ()),
        ("prompt_ids", (1, 100)),
        ("prompt_ids", (-1,)),
        ("sequence_index", -1),
        ("max_verify_len", -1),
    ],
)
def test_the_refusal_names_the_request_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}"):
        check(request={name: value})


def test_a_prompt_over_capacity_is_refused_with_both_lengths() -> None:
    check(tuple(range(MAX_SEQ_LEN)))
    with pytest.raises(RequestError, match=re.escape("the prompt has 17 tokens, at most 16 fit")):
        check(tuple(range(MAX_SEQ_LEN + 1)))
