"""Queue, priorities, times, cancellation and limits, as clients of a real server meet them."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from dspark_trt.server.options import ServeOptions
from dspark_trt.server.supervisor import TritonServer
from dspark_trt.serving.limits import AdmissionLimits, retry_after_s
from tests.support.tiny_build import MAX_REQUESTS, MAX_SEQ_LEN
from tests.support.triton_clients import Stream, generate, generate_stream, metrics, one, refusal, stream

pytestmark = pytest.mark.triton

PROMPT = "the quick brown fox"
LONG = 8000
MAX_QUEUED = 220
WAITING = 'dspark_requests_waiting{model="dspark"}'
RUNNING = 'dspark_requests_running{model="dspark"}'
PREFILLED = 'dspark_prefill_tokens_total{model="dspark"}'


@pytest.fixture(scope="module")
def tiny(tiny_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    options = ServeOptions(
        0,
        0,
        0,
        log_file=tmp_path_factory.mktemp("tiny") / "log",
        drain_s=1.0,
        admission=AdmissionLimits(max_queued_requests=MAX_QUEUED),
    )
    with TritonServer(tiny_build, options) as server:
        yield server


def request(max_tokens: int, *, is_streaming: bool = True, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "text_input": one(PROMPT.encode(), np.object_),
        "max_tokens": one(max_tokens, np.int32),
        "stream": one(is_streaming, np.bool_),
        "end_id": one(-1, np.int32),
        **more,
    }


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def wait_until_idle(tiny: TritonServer) -> None:
    wait_until(lambda: metrics(tiny.metrics_url)[RUNNING] == 0, "requests keep their rows")


def fill_rows(opened: Stream, model: str = "ensemble") -> None:
    """Every row runs a long request; each has sent something."""
    for index in range(MAX_REQUESTS):
        opened.send(model, request(LONG), request_id=f"filler {index}")
    seen: set[str] = set()
    while len(seen) < MAX_REQUESTS:
        seen.add(opened.next().get_response().id)


def test_full_queue_refuses_at_once_and_cancelled_requests_that_wait_are_never_prefilled(tiny: TritonServer) -> None:
    """Seen before: 69 cancelled requests were prefilled, one after the other, for nobody."""
    with stream(tiny.grpc_address) as running, stream(tiny.grpc_address) as waiting:
        fill_rows(running)
        for index in range(MAX_QUEUED):
            waiting.send("ensemble", request(5, is_streaming=index % 2 == 0), request_id=f"waiting {index}")
        wait_until(lambda: metrics(tiny.metrics_url)[WAITING] == MAX_QUEUED, "not all of them wait")
        started = time.monotonic()
        message = refusal(tiny.http_url, text_input=PROMPT, max_tokens=3)
        assert time.monotonic() - started < 5
        assert f"the server is busy: {MAX_QUEUED} requests wait for a row already" in message
        assert retry_after_s(message) is not None
        prefilled = metrics(tiny.metrics_url)[PREFILLED]
        waiting.client.stop_stream(cancel_requests=True)
        time.sleep(3)  # a ping to each
        running.client.stop_stream(cancel_requests=True)
        wait_until(lambda: metrics(tiny.metrics_url)[WAITING] == 0, "cancelled requests still wait", 60)
        wait_until_idle(tiny)
        assert metrics(tiny.metrics_url)[PREFILLED] == prefilled


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("model", ["ensemble", "dspark"])
def test_cancelled_request_frees_its_row(tiny: TritonServer, model: str, is_streaming: bool) -> None:
    fields = request(LONG, is_streaming=is_streaming)
    if model == "dspark":
        fields = {
            "input_ids": np.array([[7, 8, 9]], np.int32),
            "input_lengths": one(3, np.int32),
            "request_output_len": one(LONG, np.int32),
            "streaming": one(is_streaming, np.bool_),
            "end_id": one(-1, np.int32),
        }
    with stream(tiny.grpc_address) as opened:
        opened.send(model, fields)
        wait_until(lambda: metrics(tiny.metrics_url)[RUNNING] == 1, "it does not run")
        left_at = time.monotonic()
        opened.client.stop_stream(cancel_requests=True)
        wait_until(lambda: metrics(tiny.metrics_url)[RUNNING] == 0, "it keeps its row", 3)
        assert time.monotonic() - left_at < 3


def test_closed_event_stream_frees_its_row(tiny: TritonServer) -> None:
    body = json.dumps({"text_input": PROMPT, "max_tokens": LONG, "stream": True, "end_id": -1}).encode()
    with urllib.request.urlopen(f"{tiny.http_url}/v2/models/ensemble/generate_stream", body, timeout=30) as answer:
        answer.readline()
    wait_until_idle(tiny)


def test_timeout_bounds_a_request_whose_client_triton_cannot_see(tiny: TritonServer) -> None:
    """A closed /generate connection is never told to anyone (server#7077)."""
    started = time.monotonic()
    message = refusal(tiny.http_url, text_input=PROMPT, max_tokens=LONG, end_id=-1, timeout_ms=400)
    assert "timeout_ms: the request did not end within 400 ms" in message
    assert time.monotonic() - started < 3
    wait_until_idle(tiny)


def test_urgent_requests_overtake_those_that_wait(tiny: TritonServer) -> None:
    with stream(tiny.grpc_address) as running, stream(tiny.grpc_address) as waiting:
        fill_rows(running)
        for name, priority in (("low", 5), ("normal", 0), ("urgent", -5)):
            fields = request(300, is_streaming=False, priority=one(priority, np.int32))
            waiting.send("ensemble", fields, request_id=name)
        wait_until(lambda: metrics(tiny.metrics_url)[WAITING] == 3, "not all of them wait")
        handle = 0
        while not handle:  # one row becomes free: ended by its request id
            with stream(tiny.grpc_address) as stopping:
                stop = {
                    "input_ids": one(1, np.int32),
                    "input_lengths": one(1, np.int32),
                    "request_output_len": one(1, np.int32),
                    "stop": one(True, np.bool_),
                }
                stopping.send("dspark", stop, request_id="filler 0", enable_empty_final_response=True)
                stopping.next()
                handle = 1
        order = [waiting.next().get_response().id for _ in range(3)]
    assert order == ["urgent", "normal", "low"]
    wait_until_idle(tiny)


def test_two_hundred_requests_on_few_slots_are_all_exact(tiny: TritonServer) -> None:
    fields = {"max_tokens": 6, "temperature": 0.0, "end_id": -1}
    prompts = [f"{PROMPT} {index % 7}" for index in range(200)]
    alone = {prompt: generate(tiny.http_url, text_input=prompt, **fields)["text_output"] for prompt in set(prompts)}
    with ThreadPoolExecutor(200) as clients:
        answers = list(clients.map(lambda prompt: generate(tiny.http_url, text_input=prompt, **fields), prompts))
    assert [answer["text_output"] for answer in answers] == [alone[prompt] for prompt in prompts]


def test_stop_request_with_an_id_of_two_requests_ends_none(tiny: TritonServer) -> None:
    with stream(tiny.grpc_address) as opened, stream(tiny.grpc_address) as stopping:
        for _ in range(2):
            opened.send("ensemble", request(LONG), request_id="1")
        wait_until(lambda: metrics(tiny.metrics_url)[RUNNING] == 2, "not both run")
        stop = {
            "input_ids": one(1, np.int32),
            "input_lengths": one(1, np.int32),
            "request_output_len": one(1, np.int32),
            "stop": one(True, np.bool_),
        }
        stopping.send("dspark", stop, request_id="1")
        with pytest.raises(InferenceServerException, match="2 requests have this request id, and none was ended"):
            stopping.next()
        for guess in (1, 2, 3):  # nobody else's request can be guessed
            stopping.send("dspark", {**stop, "stop_handle": one(guess, np.int64)}, enable_empty_final_response=True)
            stopping.next()
        assert metrics(tiny.metrics_url)[RUNNING] == 2
    wait_until_idle(tiny)


def test_max_verify_len_bounds_the_drafts_of_a_step_and_draft_switches_them_off(tiny: TritonServer) -> None:
    answer = generate(tiny.http_url, text_input=PROMPT, max_tokens=40, end_id=-1, max_verify_len=1)
    assert answer["total_draft_tokens"] <= answer["num_steps"]
    answer = generate(tiny.http_url, text_input=PROMPT, max_tokens=40, end_id=-1, draft=False)
    assert answer["total_draft_tokens"] == 0


def test_values_that_mean_off_elsewhere_mean_off(tiny: TritonServer) -> None:
    greedy = {"text_input": PROMPT, "max_tokens": 12, "end_id": -1}
    expected = generate(tiny.http_url, **greedy, temperature=0.0)["text_output"]
    for off in ({"top_k": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.0}, {"top_k": 0, "top_p": 0.0}):
        assert generate(tiny.http_url, **greedy, temperature=0.0, **off)["text_output"] == expected
    # what inflight_batcher_llm_client.py sends without options
    assert generate(tiny.http_url, **greedy, temperature=1.0, top_k=1, top_p=0.0)["text_output"] == expected


def test_special_tokens_are_counted_shown_and_stopped_at_as_asked(tiny: TritonServer) -> None:
    forced = {"text_input": PROMPT, "max_tokens": 4, "end_id": -1, "logit_bias": '{"3": 1000000}'}
    assert generate(tiny.http_url, **forced)["text_output"] == ""
    assert generate(tiny.http_url, **forced, skip_special_tokens=False)["text_output"] == "<|im_start|>" * 4
    stopped = generate(tiny.http_url, **forced, stop_words=["<|im_start|>"])
    assert (stopped["finish_reason"], stopped["num_output_tokens"]) == ("stop", 1)


HOSTILE: list[tuple[dict[str, Any], str]] = [
    (
        {"text_input": "word " * 200_000},
        f"text_input: the prompt has 1000000 bytes, at most {16 * MAX_SEQ_LEN} are read",
    ),
    ({"messages": "[" * 200_000, "text_input": ""}, "messages: the prompt has 200000 bytes"),
    ({"stop_words": ["x"] * 100_000}, "stop_words: expected at most 16 words, found 100000"),
    ({"stop_words": ["x" * 100_000]}, "stop_words: expected at most 256 characters in a word, found 100000"),
    ({"bad_words": ["x"] * 100_000}, "bad_words: expected at most 256 words, found 100000"),
    (
        {"logit_bias": json.dumps({str(i): 1 for i in range(50_000)})},
        "logit_bias: expected at most 65536 bytes of JSON",
    ),
    (
        {"logit_bias": json.dumps({str(i): 1 for i in range(2000)})},
        "logit_bias: expected at most 1024 entries, found 2000",
    ),
    ({"logit_bias": '{"1": ' + "9" * 5000 + "}"}, "logit_bias: "),
    ({"logit_bias": '{"1": ' + "9" * 400 + "}"}, "logit_bias: "),
    ({"max_tokens": 0}, "max_tokens: expected an integer >= 1, found 0"),
    ({"end_id": 320}, "end_id: expected token ids in 0..319, found 320"),
    ({"end_id": -2}, "end_id: expected a token id, or -1"),
    ({"top_p": -0.5}, "top_p: expected a number in (0, 1], found -0.5"),
    ({"top_k": -2}, "top_k: expected an integer >= 0"),
    ({"timeout_ms": -1}, "timeout_ms: expected an integer in 0.."),
    ({"priority": 1000}, "priority: expected an integer in -100..100"),
    ({"max_verify_len": -1}, "max_verify_len: expected an integer >= 0"),
    ({"max_token": 5, "x" * 100_000: 1}, "unknown fields max_token, xxx"),
]


@pytest.mark.parametrize(("fields", "message"), HOSTILE, ids=[message[:40] for _, message in HOSTILE])
def test_hostile_request_is_refused_soon_in_a_few_words(
    tiny: TritonServer, fields: dict[str, Any], message: str
) -> None:
    started = time.monotonic()
    found = refusal(tiny.http_url, **{"text_input": PROMPT, "max_tokens": 5, **fields})
    assert time.monotonic() - started < 3
    assert message in found
    assert len(found) < 1500
    assert "Error" not in found, "no class name reaches a client"


def test_prompt_of_ten_megabytes_is_refused_before_it_is_tokenised(tiny: TritonServer) -> None:
    """It took 38 s. Over gRPC: the HTTP front of the bundled server does not survive a body of that size."""
    with stream(tiny.grpc_address) as opened:
        started = time.monotonic()
        opened.send("ensemble", {**request(5), "text_input": one(b"word " * 2_000_000, np.object_)})
        assert "text_input: the prompt has 10000000 bytes" in str(opened.read_error())
        assert time.monotonic() - started < 3


def test_hostile_requests_do_not_hold_up_the_stream_of_another(tiny: TritonServer) -> None:
    """S5: a million stop words cost a second a token for everyone; a 10 MB prompt 38 s of tokenising."""
    with stream(tiny.grpc_address) as opened, ThreadPoolExecutor(4) as clients:
        opened.send("ensemble", request(LONG))
        opened.next()
        attacks = [
            clients.submit(refusal, tiny.http_url, **{"text_input": PROMPT, "max_tokens": 5, **fields})
            for fields, _ in HOSTILE[:6]
        ]
        last, longest = time.monotonic(), 0.0
        while not all(attack.done() for attack in attacks):
            opened.next()
            now = time.monotonic()
            last, longest = now, max(longest, now - last)
        assert longest < 1.5, "a step took as long as an attack"
    wait_until_idle(tiny)


def test_packed_words_that_cannot_be_are_refused_by_name(tiny: TritonServer) -> None:
    core = {
        "input_ids": np.array([[7, 8]], np.int32),
        "input_lengths": one(2, np.int32),
        "request_output_len": one(4, np.int32),
    }
    for fields, message in (
        ({"stop_words_list": np.array([[[-5], [1]]], np.int32)}, "stop_words_list: expected token ids >= 0"),
        ({"bad_words_list": np.zeros((1, 2, 100_000), np.int32)}, "bad_words_list: expected at most"),
        ({"input_ids": np.array([[7, 5000]], np.int32)}, "text_input: expected token ids in 0..319, found 5000"),
    ):
        with stream(tiny.grpc_address) as opened:
            opened.send("dspark", {**core, **fields})
            assert message in str(opened.read_error())


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v2/systemsharedmemory/region/z/register", {"key": "/x", "offset": 0, "byte_size": 1}),
        ("GET", "/v2/systemsharedmemory/status", None),
        ("GET", "/v2/cudasharedmemory/status", None),
        ("POST", "/v2/logging", {"log_error": False, "log_verbose_level": 9}),
        ("GET", "/v2/trace/setting", None),
    ],
)
def test_apis_that_no_client_needs_are_closed(tiny: TritonServer, method: str, path: str, body: Any) -> None:
    """S2: the region of a model's own process could be registered, and error logs silenced, by anyone."""
    data = None if body is None else json.dumps(body).encode()
    with pytest.raises(HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(f"{tiny.http_url}{path}", data, method=method), timeout=10)
    assert caught.value.code == 403


def test_apis_that_no_client_needs_are_closed_over_grpc_too(tiny: TritonServer) -> None:
    client = grpc.InferenceServerClient(tiny.grpc_address)
    for call in (
        client.get_system_shared_memory_status,
        lambda: client.register_system_shared_memory("z", "/x", 1),
        lambda: client.update_log_settings({"log_error": False}),
        client.get_trace_settings,
    ):
        with pytest.raises(InferenceServerException, match="restricted"):
            call()
    assert client.is_model_ready("ensemble")


def test_probe_is_answered_while_every_row_is_taken(tiny: TritonServer) -> None:
    with stream(tiny.grpc_address) as opened:
        fill_rows(opened)
        answer = generate(tiny.http_url, text_input="?", max_tokens=1, probe=True)
        assert answer["num_output_tokens"] == 0
        wait_until(lambda: metrics(tiny.metrics_url)[RUNNING] == MAX_REQUESTS, "the rows are not all taken", 2)
    wait_until_idle(tiny)


def test_events_and_one_answer_agree(tiny: TritonServer) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 30, "temperature": 0.0, "end_id": -1, "return_log_probs": True}
    events, whole = generate_stream(tiny.http_url, **fields), generate(tiny.http_url, **fields)
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert events[-1]["cum_log_probs"] == pytest.approx(whole["cum_log_probs"], rel=1e-4)
    for name in ("finish_reason", "num_input_tokens"):  # what is drafted depends on the past
        assert events[-1][name] == whole[name]
