"""Any mixture of joins, cancellations, failures and loads: greedy output is the target's, and nothing leaks."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.support.toy_engines import (
    FLAT,
    MODERATE,
    STAIRS,
    STEEP,
    Output,
    ToyDrafter,
    ToyLanguage,
    ToyTarget,
    capricious_confidence,
    collect,
    honest_confidence,
    make_loop,
)

LANGUAGE = ToyLanguage(vocab_size=16, order=3, num_patterns=499)
CONFIGS = [
    SchedulerConfig("off"),
    SchedulerConfig("fixed"),
    SchedulerConfig("fixed", verify_len=2),
    SchedulerConfig("threshold", threshold=0.5),
    SchedulerConfig("early_stop"),
    SchedulerConfig("lagged_budget"),
    SchedulerConfig("auto"),
]
# what happens before a step; "step" alone is the most common
EVENTS = st.sampled_from(["step", "step", "submit", "submit", "cancel", "fail"])
FAILURES = st.sampled_from([("target", "forward"), ("drafter", "draft"), ("drafter", "ingest"), ("target", "move_row")])


def plain(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(LANGUAGE.logits(tokens).argmax()))
    return tokens[len(prompt) :]


@settings(max_examples=80, derandomize=True, deadline=None)
@given(data=st.data(), config=st.sampled_from(CONFIGS), table=st.sampled_from([FLAT, MODERATE, STAIRS, STEEP]))
def test_every_request_ends_with_the_targets_own_output(data: Any, config: SchedulerConfig, table: Any) -> None:
    max_requests = data.draw(st.integers(1, 4))
    max_batch_tokens = max_requests + data.draw(st.sampled_from([0, 1, 5, 40]))
    limits = EngineLimits(max_requests=max_requests, max_seq_len=24, max_batch_tokens=max_batch_tokens)
    engines: dict[str, Any] = {
        "target": ToyTarget(LANGUAGE, limits),
        "drafter": ToyDrafter(
            LANGUAGE,
            limits,
            gamma=data.draw(st.integers(2, 5)),
            skill=data.draw(st.sampled_from([1.0, 0.6, -1.0])),
            confidence=data.draw(st.sampled_from([honest_confidence, capricious_confidence, None])),
        ),
    }
    loop = make_loop(engines["target"], engines["drafter"], config, table=table)
    outputs: dict[str, Output] = {}
    requests: dict[str, GenerationRequest] = {}
    cancelled: set[str] = set()
    num_failures = 0
    for event in [*data.draw(st.lists(EVENTS, min_size=3, max_size=40)), "submit"]:
        if event == "submit":
            name = str(len(requests))
            prompt = tuple(data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=24)))
            sampling = SamplingParams(max_tokens=data.draw(st.integers(1, 30)))
            verify_len = data.draw(st.sampled_from([None, None, 0, 1]))
            requests[name] = GenerationRequest(
                request_id=name, prompt_ids=prompt, sampling=sampling, max_verify_len=verify_len
            )
            loop.submit(requests[name])
        elif event == "cancel" and requests:
            name = data.draw(st.sampled_from(sorted(requests)))
            if loop.cancel(name):
                cancelled.add(name)
        elif event == "fail":
            engine, call = data.draw(FAILURES)
            engines[engine].failures.append(call)
            num_failures += 1
        collect(loop, outputs)
    for _ in range(3000):
        if not loop.has_work:
            break
        collect(loop, outputs)
    assert not loop.has_work
    assert (loop.num_running, loop.num_queued) == (0, 0)
    assert set(outputs) == set(requests)
    for name, request in requests.items():
        output = outputs[name]
        room = limits.max_seq_len - len(request.prompt_ids) + 1
        expected = plain(request.prompt_ids, min(request.sampling.max_tokens, room))
        assert [emission.finish_reason for emission in output.emissions[:-1]] == [None] * (len(output.emissions) - 1)
        reason = output.last.finish_reason
        possible = {"length"} | ({"cancelled"} if name in cancelled else set()) | ({"error"} if num_failures else set())
        assert reason in possible
        assert output.token_ids == (expected if reason == "length" else expected[: len(output.token_ids)])
    assert loop.totals.num_finished.total() == len(requests)
    if not num_failures:
        assert loop.totals.num_finished["error"] == 0
