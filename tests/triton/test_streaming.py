"""Every way to ask the ensemble gives what the build itself gives: whole, in order, character by character."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dspark_trt.server.supervisor import TritonServer
from tests.support.triton_clients import generate, generate_stream, one, stream, text_of
from tests.triton.conftest import InProcess

pytestmark = [pytest.mark.triton, pytest.mark.demo]

PROMPT = "The history of the lighthouse begins"
NUM_TOKENS = 24
# Written in bytes that several tokens share.
UTF8_PROMPTS = ("🦊🦊🦊🦊🦊🦊🦊🦊", "日本語: 一、二、三、四、五、六、", "Greek letters: α, β, γ, δ, ε,")
CONCURRENT_PROMPTS = [
    f"{start} {subject}"
    for start in ("Once upon a time there was", "The best way to cook", "In the year 2050", "My favourite memory of")
    for subject in ("a small village", "the old river", "winter bread", "music")
]


def test_generate_gives_the_whole_answer_at_once(server: TritonServer, in_process: InProcess) -> None:
    expected = in_process.answer(PROMPT, NUM_TOKENS)
    answer = generate(server.http_url, text_input=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0)
    assert answer["text_output"] == expected.text
    assert answer["num_output_tokens"] == NUM_TOKENS
    assert answer["num_input_tokens"] == expected.num_prompt_tokens
    assert answer["finish_reason"] == "length"
    assert 0 < answer["num_steps"] <= NUM_TOKENS - 1
    assert answer["total_accepted_draft_tokens"] == NUM_TOKENS - 1 - answer["num_steps"]
    assert answer["total_draft_tokens"] >= answer["total_accepted_draft_tokens"]


def test_generate_stream_gives_deltas_that_add_up(server: TritonServer, in_process: InProcess) -> None:
    expected = in_process.answer(PROMPT, NUM_TOKENS)
    events = generate_stream(server.http_url, text_input=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0)
    assert "".join(event["text_output"] for event in events) == expected.text
    assert sum(event["num_output_tokens"] for event in events) == NUM_TOKENS
    assert [event["finish_reason"] for event in events] == [""] * (len(events) - 1) + ["length"]
    assert len(events) == 1 + events[-1]["num_steps"], "one response for each step, and one for the prompt's own token"


def test_grpc_stream_marks_the_last_response_final(server: TritonServer, in_process: InProcess) -> None:
    expected = in_process.answer(PROMPT, NUM_TOKENS)
    with stream(server.grpc_address) as opened:
        opened.send(
            "ensemble",
            {
                "text_input": one(PROMPT.encode(), np.object_),
                "max_tokens": one(NUM_TOKENS, np.int32),
                "stream": one(True, np.bool_),
                "temperature": one(0.0, np.float32),
                "return_log_probs": one(True, np.bool_),
            },
        )
        results = opened.read_all()
    assert "".join(map(text_of, results)) == expected.text
    log_probs = np.concatenate([result.as_numpy("output_log_probs").ravel() for result in results])
    np.testing.assert_allclose(log_probs, expected.log_probs, atol=1e-3)
    np.testing.assert_allclose(results[-1].as_numpy("cum_log_probs"), [[sum(expected.log_probs)]], atol=1e-2)


def test_concurrent_streams_are_byte_exact(server: TritonServer, in_process: InProcess) -> None:
    expected = [answer.text for answer in in_process.answers(CONCURRENT_PROMPTS, NUM_TOKENS)]

    def ask(prompt: str) -> str:
        events = generate_stream(server.http_url, text_input=prompt, max_tokens=NUM_TOKENS, temperature=0.0)
        return "".join(event["text_output"] for event in events)

    with ThreadPoolExecutor(len(CONCURRENT_PROMPTS)) as clients:
        assert list(clients.map(ask, CONCURRENT_PROMPTS)) == expected


@pytest.mark.parametrize("prompt", UTF8_PROMPTS)
def test_characters_that_span_tokens_arrive_whole(server: TritonServer, in_process: InProcess, prompt: str) -> None:
    expected = in_process.answer(prompt, NUM_TOKENS).text
    events = generate_stream(server.http_url, text_input=prompt, max_tokens=NUM_TOKENS, temperature=0.0)
    assert "".join(event["text_output"] for event in events) == expected
    assert not expected.isascii()
    for event in events[:-1]:  # the last one may end within a character
        assert "\ufffd" not in event["text_output"]


def test_chat_and_messages_apply_the_template(server: TritonServer, in_process: InProcess) -> None:
    question = "What is the capital of France?"
    expected = in_process.answer(question, NUM_TOKENS, chat=True)
    as_chat = generate(server.http_url, text_input=question, chat=True, max_tokens=NUM_TOKENS, temperature=0.0)
    messages = json.dumps([{"role": "user", "content": question}])
    as_messages = generate(server.http_url, text_input="", messages=messages, max_tokens=NUM_TOKENS, temperature=0.0)
    assert as_chat["text_output"] == as_messages["text_output"] == expected.text
    assert as_chat["num_input_tokens"] == expected.num_prompt_tokens
    assert as_chat["finish_reason"] == "stop"


def test_seeded_samples_repeat_and_stop_words_end_the_text(server: TritonServer) -> None:
    sampled = {"text_input": PROMPT, "max_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 7}
    sampled["draft"] = False  # the sample follows from seed and verify lengths, and those from measured times
    first = generate(server.http_url, **sampled)["text_output"]
    assert generate(server.http_url, **sampled)["text_output"] == first
    greedy = generate(server.http_url, text_input=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0)["text_output"]
    stop = greedy.split()[3]
    stopped = generate(
        server.http_url, text_input=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, stop_words=[stop, "never"]
    )
    assert stopped["text_output"] == greedy[: greedy.index(stop)]
    assert stopped["finish_reason"] == "stop"
