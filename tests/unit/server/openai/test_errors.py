"""What the engine's errors are to a client: its own mistake, a busy server, or an id."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace

import grpc
import pytest

from dspark_trt.errors import RequestError
from dspark_trt.runtime.request import GenerationRequest, SamplingParams, validate
from dspark_trt.server.openai.errors import of_engine, of_text
from dspark_trt.server.openai.generate import error_body
from dspark_trt.serving.adapter import with_client_names
from dspark_trt.serving.worker import STOPPING


@pytest.mark.parametrize(
    ("text", "status", "param"),
    [
        ("temperature: expected a number in [0, 100], found -1.0", 400, "temperature"),
        ("stop_words: expected at most 16 words, found 17", 400, "stop"),
        ("in ensemble 'ensemble', text_input: the prompt is empty", 400, "prompt"),
        ("in ensemble 'ensemble', unknown field temprature; known fields: a, b", 400, None),
        ("text_input, messages: expected one of them, found both", 400, None),
        ("bad_words and min_tokens: together they mask every token", 400, None),
        ("logit_bias[5]: expected a number in [-1000000, 1000000], found inf", 400, "logit_bias"),
        ("request id: expected at most 256 characters, found 10000", 400, None),
        ("the text is not valid Unicode; send it as UTF-8", 400, None),
        ("this model has no chat template; send a plain prompt", 400, None),
        ("timeout_ms: expected an integer in 0..86400000, found -1", 400, "timeout_ms"),
        ("timeout_ms: the request did not end within 10 ms and was stopped", 504, "timeout_ms"),
        ("the server is busy: 512 requests wait for a row already; retry after 7 s", 503, None),
        ("the request was cancelled", 503, None),
        (STOPPING, 503, None),
        ("Request for unknown model: 'dspark' has no available versions", 503, None),
        ("internal error 12ab34cd; the server's log says more", 500, None),
    ],
)
def test_errors_within_a_stream_have_a_text_only(text: str, status: int, param: str | None) -> None:
    error = of_text(text)
    assert (error.status, error.param) == (status, param)


SOUND = GenerationRequest(request_id="1", prompt_ids=(1,), sampling=SamplingParams())


def odd_requests() -> Iterator[tuple[str, GenerationRequest]]:
    """A value that is not acceptable, for every field that `validate` looks at."""
    sampling = {
        **dict.fromkeys(("max_tokens", "min_tokens", "top_k"), -1),
        **dict.fromkeys(("temperature", "top_p", "min_p"), math.inf),
        **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), math.nan),
        "seed": -1,
        "num_log_probs": 99,
        "logit_bias": {5: math.inf},
        "bad_words": ((-5,),),
        "stop_strings": ("",),
        "stop_token_ids": (-1,),
    }
    assert sampling.keys() | {"include_stop_string", "ignore_eos", "skip_special_tokens"} == {
        field.name for field in fields(SamplingParams)
    }
    for name, value in sampling.items():
        yield name, replace(SOUND, sampling=SamplingParams(**{name: value}))
    for name, value in {"prompt_ids": (), "max_verify_len": -1, "cache_salt": "x" * 999, "sequence_index": -1}.items():
        yield name, replace(SOUND, **{name: value})


@pytest.mark.parametrize(("name", "odd"), list(odd_requests()), ids=lambda part: part if isinstance(part, str) else "")
def test_every_refusal_of_the_engine_is_told_as_the_clients_mistake(name: str, odd: GenerationRequest) -> None:
    """A refusal that was not known as one became an internal error: `logit_bias[5]: ...`."""
    with pytest.raises(RequestError) as refused:
        validate(odd, vocab_size=320, max_seq_len=64)
    error = of_text(str(with_client_names(refused.value)))
    assert error.status == 400, str(refused.value)


def test_generate_names_the_fields_that_its_client_sent() -> None:
    error = of_text("in ensemble 'ensemble', stop_words: expected at most 16 words, found 17")
    assert error_body(error) == {"error": "stop_words: expected at most 16 words, found 17"}


def test_a_busy_server_says_when_to_come_again() -> None:
    error = of_engine(grpc.StatusCode.UNAVAILABLE, "the server is busy: ...; retry after 7 s")
    assert (error.status, error.headers) == (503, {"Retry-After": "7"})


def test_a_request_that_took_too_long_is_not_sent_again_by_clients() -> None:
    assert of_text("timeout_ms: the request did not end within 10 ms").headers == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    "text",
    [
        "Stub process 'dspark_0_0' is not healthy.",
        "Failed to process the request(s) for model 'dspark', message: ... At: /home/x/1/model.py(7): execute",
    ],
)
def test_no_words_of_triton_reach_a_client(text: str) -> None:
    error = of_text(text)
    assert error.status == 500
    assert error.message.startswith("internal error ")
    assert "model" not in error.message


def test_no_address_reaches_a_client() -> None:
    error = of_engine(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: ipv4:127.0.0.1:1")
    assert error.status == 503
    assert "127.0.0.1" not in error.message
