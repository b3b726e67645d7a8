"""What is refused, how a request is ended, and what the metrics say of it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from dspark_trt.deployment import Deployment
from dspark_trt.server.supervisor import TritonServer
from tests.support.triton_clients import generate, metrics, one, post, refusal, stream

pytestmark = [pytest.mark.triton, pytest.mark.demo]

PROMPT = "Count: one two three"
LONG = 3000  # tokens: minutes of work, unless the request is ended
CANCELLED = 'dspark_requests_total{model="dspark",outcome="cancelled"}'
RUNNING = 'dspark_requests_running{model="dspark"}'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_input": ""}, "text_input: the prompt is empty"),
        ({"max_tokens": 0}, "max_tokens: expected an integer >= 1, found 0"),
        ({"max_token": 5}, "unknown field max_token; known fields: text_input"),
        ({"beam_width": 4}, "beam_width: expected 1, found 4"),
        ({"temperature": -1.0}, "temperature: expected a number in [0, 100], found -1.0"),
        ({"messages": "[{"}, "messages: not valid JSON"),
        ({"lora_task_id": 3}, "lora_task_id: expected 0, found 3; LoRA is not supported"),
        ({"text_input": ["a", "b"], "max_tokens": [1, 1]}, "batch-size must be <= 1 for 'ensemble'"),
    ],
)
def test_refusal_names_the_field(server: TritonServer, fields: dict[str, Any], message: str) -> None:
    assert message in refusal(server.http_url, **{"text_input": PROMPT, "max_tokens": 5, **fields})


@pytest.mark.parametrize(
    ("fields", "missing"),
    [({"text_input": PROMPT}, "max_tokens"), ({"max_tokens": 3}, "text_input"), ({"messages": "[]"}, "messages")],
)
def test_request_that_lacks_a_field_is_refused_and_never_answered_with_silence(
    server: TritonServer, fields: dict[str, Any], missing: str
) -> None:
    """Triton itself only counts inputs: an optional one would stand in for the one that is missing."""
    for optional in ({}, {"stream": False, "temperature": 0.5}):
        assert f"{missing}: " in refusal(server.http_url, **fields, **optional)
    status, body = post(server.http_url, "ensemble/generate_stream", {**fields, "stream": True})
    assert status == 400
    assert f"{missing}: ".encode() in body


def test_prompt_over_capacity_is_refused_with_both_numbers(server: TritonServer, demo: Deployment) -> None:
    capacity = demo.target.limits.max_seq_len
    prompt = "word " * (capacity + 10)
    message = refusal(server.http_url, text_input=prompt, max_tokens=5)
    assert f"the prompt has {len(demo.codec.encode(prompt))} tokens, at most {capacity} fit" in message


def test_misspelt_tensor_is_refused_over_grpc_too(server: TritonServer) -> None:
    with stream(server.grpc_address) as opened:
        opened.send("ensemble", {**_request(5), "max_token": one(5, np.int32)})
        assert "max_token" in str(opened.read_error())


def test_stop_request_ends_the_request_of_that_id(server: TritonServer) -> None:
    with stream(server.grpc_address) as opened:
        opened.send("dspark", _core_request(LONG), request_id="77")
        opened.next()
        opened.send("dspark", {**_core_request(0), "stop": one(True, np.bool_)}, request_id="77")
        error = opened.read_error()
    assert "the request was cancelled" in str(error)


@pytest.mark.parametrize("model", ["ensemble", "dspark"])
def test_client_that_walks_away_frees_its_row(server: TritonServer, model: str) -> None:
    """Triton does not tell the running step of an ensemble; postprocessing does."""
    before = metrics(server.metrics_url)[CANCELLED]
    with stream(server.grpc_address) as opened:
        opened.send(model, _request(LONG) if model == "ensemble" else _core_request(LONG))
        opened.next()
    deadline = time.monotonic() + 60
    while metrics(server.metrics_url)[CANCELLED] == before:
        assert time.monotonic() < deadline, "the request goes on without its client"
        time.sleep(0.1)
    while metrics(server.metrics_url)[RUNNING] != 0:
        assert time.monotonic() < deadline, "the request keeps its row"
        time.sleep(0.1)


def test_metrics_count_what_was_generated(server: TritonServer) -> None:
    tokens = 'dspark_tokens_total{model="dspark"}'
    verified = 'dspark_drafts_total{model="dspark",state="verified"}'
    before = metrics(server.metrics_url)
    answer = generate(server.http_url, text_input=PROMPT, max_tokens=20, temperature=0.0, end_id=-1)
    after = metrics(server.metrics_url)
    assert after[tokens] - before[tokens] == answer["num_output_tokens"] == 20
    assert after[verified] - before[verified] == answer["total_draft_tokens"]
    names = ('dspark_steps_total{model="dspark"}', 'dspark_step_seconds_count{model="dspark"}')
    num_steps, num_observed = (after[name] - before[name] for name in names)
    assert num_steps == num_observed >= answer["num_steps"]


def test_error_of_one_request_leaves_the_stream_usable(server: TritonServer) -> None:
    with stream(server.grpc_address) as opened:
        opened.send("ensemble", _request(0))
        with pytest.raises(InferenceServerException, match="max_tokens: expected an integer >= 1"):
            opened.next()
        opened.send("ensemble", _request(3))
        assert sum(int(result.as_numpy("num_output_tokens").item()) for result in opened.read_all()) == 3


def _request(max_tokens: int) -> dict[str, np.ndarray]:
    return {
        "text_input": one(PROMPT.encode(), np.object_),
        "max_tokens": one(max_tokens, np.int32),
        "stream": one(True, np.bool_),
        "temperature": one(0.0, np.float32),
        "end_id": one(-1, np.int32),
    }


def _core_request(max_tokens: int) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.array([[504, 1123, 28]], np.int32),
        "input_lengths": one(3, np.int32),
        "request_output_len": one(max_tokens, np.int32),
        "streaming": one(True, np.bool_),
        "end_id": one(-1, np.int32),
    }
