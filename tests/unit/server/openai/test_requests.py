"""What a client may ask: fields, limits, and refusals that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_trt.server.openai.errors import ApiError
from dspark_trt.server.openai.messages import chat_messages
from dspark_trt.server.openai.requests import ChatRequest, CompletionRequest
from dspark_trt.server.openai.validation import read_request

HI = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatRequest:
    return read_request(ChatRequest, {"messages": HI, **fields}, "m")


def completion(**fields: Any) -> CompletionRequest:
    return read_request(CompletionRequest, {"prompt": "a", **fields}, "m")


@pytest.mark.parametrize(
    ("kind", "fields", "param", "message"),
    [
        (chat, {"temprature": 0}, "temprature", "unknown field 'temprature'"),
        (chat, {"stop": ["x"] * 17}, "stop", "at most 16"),
        (chat, {"stop": "x" * 257}, "stop", "at most 256"),
        (chat, {"stop": ["x" * 257]}, "stop", "at most 256"),
        (chat, {"logit_bias": {str(i): 1.0 for i in range(1025)}}, "logit_bias", "at most 1024"),
        (chat, {"n": 33}, "n", "less than or equal to 32"),
        (chat, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (chat, {"temperature": "hot"}, "temperature", "valid number"),
        (chat, {"stream": 1}, "stream", "valid boolean"),
        (chat, {"seed": 2**64}, "seed", "64 bits"),
        (chat, {"top_logprobs": 5}, "top_logprobs", "with logprobs = true only"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        (completion, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
        (chat, {"tool_choice": "required"}, "tool_choice", "guided decoding"),
        (chat, {"tool_choice": {"type": "function"}}, "tool_choice", "guided decoding"),
        (chat, {"response_format": {"type": "json_object"}}, "response_format", "guided decoding"),
        (chat, {"stream_options": {"include_usage": True}}, "stream_options", "with stream"),
        (chat, {"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown field"),
        (chat, {"max_verify_len": -1}, "max_verify_len", "greater than or equal to 0"),
        (chat, {"timeout_ms": 10**9}, "timeout_ms", "less than or equal"),
        (chat, {"messages": "Hi"}, "messages", "valid list"),
        (completion, {"prompt": ""}, "prompt", "empty"),
        (completion, {"prompt": ["a", ""]}, "prompt", "empty"),
        (completion, {"prompt": ["a", [1]]}, "prompt", "list of lists of token ids"),
        (completion, {"prompt": [-1]}, "prompt", "list of lists of token ids"),
        (completion, {"prompt": ["a"] * 17, "n": 2}, "n", "at most 32 answers"),
        (completion, {"best_of": 2}, "best_of", "not ranked"),
        (completion, {"suffix": "x"}, "suffix", "None"),
        (completion, {"echo": True, "logprobs": 0}, "echo", "without logprobs"),
        (completion, {"messages": HI}, "messages", "unknown field"),
    ],
)
def test_refusals_name_the_field(kind: Any, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        kind(**fields)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert message in refused.value.message
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


def test_a_required_field_that_is_missing_is_named() -> None:
    with pytest.raises(ApiError, match="messages: a required field is missing"):
        read_request(ChatRequest, {}, "m")


def test_refusals_do_not_repeat_what_a_client_sent_at_length() -> None:
    for fields in ({"x" * 10_000: 1}, {"temperature": "x" * 10_000}, {"messages": "x" * 10_000}):
        with pytest.raises(ApiError) as refused:
            chat(**fields)
        assert len(refused.value.message) < 400


def test_another_model_is_not_found() -> None:
    assert chat(model="m").model == "m"
    with pytest.raises(ApiError, match="'gpt' does not exist; this server has 'm'") as refused:
        chat(model="gpt")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_integers_stand_for_fractions() -> None:
    assert chat(temperature=1, logit_bias={"5": 100}).temperature == 1.0


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_tool_calls_and_parts_become_what_templates_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    broken = {"type": "function", "function": {"name": "now", "arguments": "{"}}
    messages = chat_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "assistant", "content": None, "tool_calls": [call, broken]},
            {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        ]
    )
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"zone": "UTC"}
    assert messages[1]["tool_calls"][1] == broken  # the model wrote it so
    assert messages[2]["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "x"}, r"messages\[0\].role"),
        ({"role": "user", "content": 5}, r"messages\[0\].content"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            r"content\[0\]: expected a part of type text, found 'image_url'",
        ),
    ],
)
def test_messages_that_are_no_text(message: dict[str, Any], text: str) -> None:
    with pytest.raises(ApiError, match=text):
        chat_messages([message])
