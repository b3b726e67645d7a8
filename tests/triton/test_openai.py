"""The front end before a real tritonserver, through the official client and raw HTTP."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from dspark_trt.deployment import Deployment
from dspark_trt.server.openai.process import FrontEndProcess, start_front_end
from dspark_trt.server.openai.settings import FrontEndOptions
from dspark_trt.server.supervisor import TritonServer
from tests.support.browser import page_of
from tests.support.openai_clients import events, post_and_leave, request, wait
from tests.support.triton_clients import generate, generate_stream, metrics
from tests.triton.conftest import InProcess

pytestmark = [pytest.mark.triton, pytest.mark.demo]

MODEL = "smollm2"
PROMPT = "The three primary colours are"
QUESTION = "What is the capital of France?"
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]
NUM_TOKENS = 16
LONG = 3000
# How much is drafted depends on measured times, so two equal requests may differ in these.
DECIDED_BY_THE_SCHEDULE = (
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "acceptance_rate",
    "num_steps",
    "num_cached_tokens",
)
PUBLISHED_WITHIN_S = 1.0  # metrics are brought up to date a few times a second
GONE_WITHIN_S = 10.0  # on a loaded machine; two steps on a quiet one


@pytest.fixture(scope="module")
def front_end(server: TritonServer, demo_build: Path) -> Iterator[FrontEndProcess]:
    addresses = {"grpc_address": server.grpc_address, "metrics_url": server.metrics_url}
    with start_front_end(demo_build, FrontEndOptions(port=0), **addresses) as running:
        yield running


@pytest.fixture(scope="module")
def client(front_end: FrontEndProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front_end.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0.0, **fields)


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(
        **{"model": MODEL, "prompt": prompt, "temperature": 0.0, "max_tokens": NUM_TOKENS, **fields}
    )


def test_a_chat_is_answered_as_in_process(client: openai.OpenAI, in_process: InProcess) -> None:
    expected = in_process.answer(QUESTION, NUM_TOKENS, chat=True)
    answer = chat(client, max_completion_tokens=NUM_TOKENS, logprobs=True)
    (choice,) = answer.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == "stop"
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(expected.log_probs, abs=1e-3)
    assert "".join(token.token for token in choice.logprobs.content).startswith(expected.text)


def test_alternatives_to_each_token_are_the_targets_own(
    client: openai.OpenAI, in_process: InProcess, demo: Deployment
) -> None:
    """Streamed and whole, with drafts; the first alternative is the greedy token itself."""
    expected = in_process.answer(QUESTION, NUM_TOKENS, chat=True)
    codec = demo.codec
    texts = [[codec.decode([each], skip_special_tokens=False) for each, _ in top] for top in expected.top_log_probs]
    values = [[value for _, value in top] for top in expected.top_log_probs]
    asked = {"max_tokens": NUM_TOKENS, "logprobs": True, "top_logprobs": 2}
    (whole,) = chat(client, **asked).choices
    chunks = chat(client, **asked, stream=True)
    streamed = [
        token for chunk in chunks for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    for tokens in (whole.logprobs.content, streamed):
        assert [[top.token for top in token.top_logprobs] for token in tokens] == texts
        for token, value in zip(tokens, values, strict=True):
            assert [top.logprob for top in token.top_logprobs] == pytest.approx(value, abs=1e-3)
            assert token.top_logprobs[0].token == token.token


def test_alternatives_of_a_completion_are_keyed_by_their_text(client: openai.OpenAI, in_process: InProcess) -> None:
    expected = in_process.answer(PROMPT, NUM_TOKENS)
    found = complete(client, logprobs=2).choices[0].logprobs
    for top, token, values in zip(found.top_logprobs, found.tokens, expected.top_log_probs, strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx([value for _, value in values], abs=1e-3)
        assert token in top
    sampled = complete(client, logprobs=1, temperature=2.0, seed=3, max_tokens=24).choices[0].logprobs
    assert all(token in top for top, token in zip(sampled.top_logprobs, sampled.tokens, strict=True))
    assert 2 in map(len, sampled.top_logprobs), "a drawn token stands beside the most probable one"


def test_a_streamed_chat_is_the_same_in_pieces(client: openai.OpenAI, in_process: InProcess) -> None:
    expected = in_process.answer(QUESTION, NUM_TOKENS, chat=True)
    chunks = list(chat(client, max_tokens=NUM_TOKENS, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in pieces if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.token_ids)
    assert all(chunk.usage is None for chunk in pieces)
    statistics = last.metrics["speculative_decoding"]
    histogram = statistics["acceptance_histogram"]
    assert len(histogram) == statistics["num_spec_tokens"] + 1 == 8
    assert sum(histogram) == statistics["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == statistics["num_accepted_draft_tokens"]


def test_several_prompts_in_text_and_ids(client: openai.OpenAI, in_process: InProcess) -> None:
    expected = in_process.answer(PROMPT, NUM_TOKENS)
    answer = complete(client, [PROMPT, "One two three"], echo=True)
    assert answer.choices[0].text == PROMPT + expected.text
    assert answer.choices[1].text.startswith("One two three")
    from_text = complete(client, logprobs=0).choices[0]
    assert from_text.text == expected.text
    assert from_text.logprobs.token_logprobs == pytest.approx(expected.log_probs, abs=1e-3)
    assert "".join(from_text.logprobs.tokens) == expected.text
    ids = complete(client, [[504, 3575, 282, 4649, 314]], max_tokens=4)
    assert ids.usage.prompt_tokens == 5


def test_stop_seed_and_n(client: openai.OpenAI, in_process: InProcess) -> None:
    text = in_process.answer(PROMPT, NUM_TOKENS).text
    stop = text.split()[3]
    stopped = complete(client, stop=stop).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    sampled = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 8, "extra_body": {"max_verify_len": 0}}
    first, second = ({choice.index: choice.text for choice in complete(client, **sampled).choices} for _ in range(2))
    assert first == second
    assert len(first) == 3
    assert len(set(first.values())) > 1


def test_streams_of_several_answers_keep_them_apart(client: openai.OpenAI, in_process: InProcess) -> None:
    text = in_process.answer(PROMPT, NUM_TOKENS).text
    parts = ["", ""]
    for chunk in complete(client, n=2, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == [text, text]


def test_drafting_is_switched_off_and_bounded(client: openai.OpenAI) -> None:
    assert complete(client, extra_body={"draft": False}).metrics is None
    bounded = complete(client, extra_body={"max_verify_len": 1}).metrics["speculative_decoding"]
    assert sum(bounded["acceptance_histogram"][2:]) == 0


def test_tools_and_template_arguments_reach_the_template(client: openai.OpenAI) -> None:
    plain = chat(client, max_tokens=1).usage.prompt_tokens
    no_prompt = chat(client, max_tokens=1, extra_body={"chat_template_kwargs": {"add_generation_prompt": False}})
    assert no_prompt.usage.prompt_tokens < plain
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    tools: Any = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    messages: Any = [
        *CHAT,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > plain


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature: expected"),
        ({"extra_body": {"temprature": 0}}, openai.BadRequestError, "unknown field 'temprature'"),
        ({"prompt": "word " * 5000}, openai.BadRequestError, "prompt"),
        ({"prompt": "x" * 70_000}, openai.BadRequestError, "prompt: the prompt has 70000 bytes"),
        ({"model": "gpt"}, openai.NotFoundError, "'gpt' does not exist"),
    ],
)
def test_refusals_in_openais_form(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], message: str, stream: bool
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        complete(client, **fields, stream=stream)


def test_half_a_character_is_refused(front_end: FrontEndProcess) -> None:
    """JSON can name it, UTF-8 cannot hold it, and the official client cannot send it."""
    status, body = request(front_end.url, "/v1/completions", {"prompt": "\ud800", "stream": True})
    assert status == 400
    assert json.loads(body)["error"]["message"].startswith("prompt: not valid UTF-8")


def test_a_request_has_a_time_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="timeout_ms") as refused:
        complete(client, max_tokens=LONG, extra_body={"timeout_ms": 200, "ignore_eos": True})
    assert refused.value.status_code == 504
    with pytest.raises(openai.APIError, match="timeout_ms"):
        list(complete(client, max_tokens=LONG, stream=True, extra_body={"timeout_ms": 800, "ignore_eos": True}))


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/completions", False),
        ("/v1/completions", True),
        ("/v2/models/ensemble/generate_stream", True),
        ("/v2/models/ensemble/generate", False),
    ],
)
def test_a_client_that_leaves_frees_its_row(
    server: TritonServer, front_end: FrontEndProcess, path: str, stream: bool
) -> None:
    def sample(name: str) -> float:
        return metrics(server.metrics_url)[name]

    running = 'dspark_requests_running{model="dspark"}'
    total = 'dspark_requests_total{model="dspark",outcome="cancelled"}'
    # Metrics are a moment late: a request of the test before must not pass for ours.
    wait(lambda: sample(running) == 0)
    time.sleep(PUBLISHED_WITHIN_S)
    cancelled = sample(total)
    is_openai = path.startswith("/v1")
    prompt = {"prompt": PROMPT, "ignore_eos": True} if is_openai else {"text_input": PROMPT, "end_id": -1}
    body = {**prompt, "max_tokens": LONG, "stream": stream}
    post_and_leave(front_end.url, path, body, is_read=stream, until=lambda: sample(running) == 1)
    wait(lambda: sample(running) == 0, GONE_WITHIN_S)
    wait(lambda: sample(total) == cancelled + 1, GONE_WITHIN_S)


def test_concurrent_streams_are_byte_exact(client: openai.OpenAI, in_process: InProcess) -> None:
    prompts = [f"{PROMPT} and number {number}" for number in ("one", "two", "four", "six")] * 2
    expected = [answer.text for answer in in_process.answers(prompts, NUM_TOKENS)]

    def ask(prompt: str) -> str:
        return "".join(chunk.choices[0].text for chunk in complete(client, prompt, stream=True))

    with ThreadPoolExecutor(len(prompts)) as clients:
        assert list(clients.map(ask, prompts)) == expected


def test_usage_tells_what_of_a_prompt_was_not_read_again(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "extra_body": {"ignore_eos": True, "cache_salt": "usage"}}
    first, again = (complete(client, "one two three four " * 20, **fields) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens // 2 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens
    assert again.choices[0].text == first.choices[0].text


def test_generate_answers_as_triton_does(server: TritonServer, front_end: FrontEndProcess) -> None:
    fields = {
        "text_input": PROMPT,
        "max_tokens": 8,
        "temperature": 0.0,
        "return_log_probs": True,
        "stop_words": ["x", "y"],
    }
    status, body = request(front_end.url, "/v2/models/ensemble/generate", fields)
    ours, triton = json.loads(body), generate(server.http_url, **fields)
    own_to_triton = ("sequence_id", "sequence_start", "sequence_end")  # of its sequences, which are not used here
    assert status == 200
    assert ours.keys() == triton.keys() - set(own_to_triton)
    for name, value in ours.items():
        if name in DECIDED_BY_THE_SCHEDULE:
            continue
        assert value == (pytest.approx(triton[name], abs=1e-4) if "log_prob" in name else triton[name]), name
    status, body = request(front_end.url, "/v2/models/ensemble/generate_stream", {**fields, "stream": True})
    streamed = generate_stream(server.http_url, **fields)
    assert "".join(event["text_output"] for event in events(body)) == "".join(
        event["text_output"] for event in streamed
    )


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 0}, "unknown field 'temprature'"),
        ({"max_tokens": "8"}, "max_tokens: expected an integer of 32 bits"),
        ({"max_tokens": 2**40}, "max_tokens: expected an integer of 32 bits"),
        ({"temperature": [0.0, 1.0]}, "temperature: expected a number"),
        ({"stop_words": ["a"] * 300}, "stop_words: expected at most 256"),
        ({"temperature": -1}, "temperature: expected a number in [0, 100]"),
    ],
)
def test_generate_refuses_by_name(front_end: FrontEndProcess, route: str, fields: dict[str, Any], message: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": 8, **fields}
    status, answer = request(front_end.url, f"/v2/models/ensemble/{route}", body)
    assert status == 400
    assert message in json.loads(answer)["error"]


def test_a_deep_body_that_ends_triton_is_refused_here(front_end: FrontEndProcess, server: TritonServer) -> None:
    deep = b'{"text_input":' + b"[" * 200_000 + b"]" * 200_000 + b', "max_tokens": 1}'
    for path in ("/v2/models/ensemble/generate", "/v1/completions"):
        status, body = request(front_end.url, path, deep)
        assert status == 400
        assert b"nested deeper than 64 levels" in body
    assert not server.has_died()


def test_what_operators_read(front_end: FrontEndProcess, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert request(front_end.url, "/health") == (200, b'{"status":"ready"}')
    status, body = request(front_end.url, "/metrics")
    assert status == 200
    assert b"\ndspark_requests_total{" in body
    assert b"\nnv_inference_request_success{" in body
    status, body = request(front_end.url, "/nothing")
    assert status == 404
    assert json.loads(body)["error"]["message"] == "GET /nothing: Not Found"


def test_the_live_page_shows_what_live_says(front_end: FrontEndProcess, client: openai.OpenAI) -> None:
    """Every number that the page shows is one that `/live` has, and it loads nothing from elsewhere."""
    request(front_end.url, "/live")
    complete(client)
    now: dict[str, Any] = {}

    def has_seen_it() -> bool:
        now.update(json.loads(request(front_end.url, "/live")[1]))
        return bool(now["accepted_len"] and now["ttft_s"] and now["verify_len"] is not None)

    wait(has_seen_it)
    assert now["ready"] is True
    assert now["rows"] == 32
    assert 1.0 <= now["accepted_len"] <= 8.0
    assert 0.0 <= now["skipping"] <= 1.0
    page = request(front_end.url, "/")[1].decode()
    shown = set(re.findall(r'put\("(\w+)"', page))
    assert shown <= now.keys()
    assert {"ttft_s", "accepted_len", "verify_len", "skipping", "waiting"} <= shown
    assert all(f'id="{name}"' in page for name in shown)
    assert not re.search(r"https?://|src=|<link", page)


def test_the_live_page_in_a_browser(front_end: FrontEndProcess, client: openai.OpenAI) -> None:
    """Its policy lets its own script run, and the script fills in every field."""
    complete(client)
    page = page_of(front_end.url + "/")
    fields = dict(re.findall(r'<(?:dd|p|small|span) id="(\w+)"[^>]*>([^<]*)</', page))
    assert (fields["state"], fields["model"]) == ("ready", MODEL)
    assert re.fullmatch(r"\d+ of 32", fields["load"])
    assert re.fullmatch(r"[1-8]\.\d\d|–", fields["accepted_len"])
    assert re.fullmatch(r"\d+\.\d %", fields["kv_used"])


def test_curl(front_end: FrontEndProcess) -> None:
    """As the documentation writes it."""
    body = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 8, "temperature": 0})
    command = [
        "curl",
        "-sN",
        f"{front_end.url}/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        body,
    ]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert answer["choices"][0]["message"]["content"].startswith("The capital of France")


def test_it_ends_with_the_process_that_started_it(server: TritonServer, demo_build: Path) -> None:
    """However that one went."""
    script = (
        "import sys, os; from pathlib import Path; from dspark_trt.server.openai.process import start_front_end;"
        "from dspark_trt.server.openai.settings import FrontEndOptions\n"
        "with start_front_end(Path(sys.argv[1]), FrontEndOptions(0), grpc_address=sys.argv[2], metrics_url='') as f:\n"
        "    print(f.url, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(demo_build), server.grpc_address]
    url = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    assert url.startswith("http://127.0.0.1:")

    def is_gone() -> bool:
        try:
            request(url, "/v2/health/live")
        except OSError:
            return True
        return False

    wait(is_gone, 15.0)
