"""Any mixture of shared prefixes, joins, cancellations, moves, failures: rows hold what was written for their tokens.

The toy engines refuse to read what was never written; here every row is compared with its request's own tokens, too,
and a call that fails spoils the rows of its requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch, TargetBatch, TargetOutput
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import EngineBuildError
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.support.toy_engines import MODERATE, Output, ToyDrafter, ToyLanguage, ToyTarget, collect, make_loop

LANGUAGE = ToyLanguage(vocab_size=16, order=3, num_patterns=499)
CONFIGS = [SchedulerConfig("off"), SchedulerConfig("fixed"), SchedulerConfig("early_stop"), SchedulerConfig("auto")]
SPOILED = 15  # a token of the language: only a comparison finds it
EVENTS = st.sampled_from([*["step"] * 4, *["submit"] * 4, "cancel", "fail"])
FAILURES = st.sampled_from(
    [
        ("target", "forward"),
        ("target", "move_row"),
        ("drafter", "move_row"),
        ("drafter", "draft"),
        ("drafter", "ingest"),
    ]
)
BEGINNINGS = [tuple(np.random.default_rng(seed).integers(0, 15, 48).tolist()) for seed in range(2)]


class SpoilingTarget(ToyTarget):
    def forward(self, batch: TargetBatch) -> TargetOutput:
        try:
            return super().forward(batch)
        except EngineBuildError:
            self.store.tokens[batch.rows] = SPOILED
            raise

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        try:
            super().move_row(source, destination, num_positions)
        except EngineBuildError:
            self.store.tokens[destination] = SPOILED
            raise


class SpoilingDrafter(ToyDrafter):
    def ingest(self, batch: IngestBatch) -> None:
        try:
            super().ingest(batch)
        except EngineBuildError:
            self.store.tokens[batch.rows] = SPOILED
            raise

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        try:
            return super().draft(batch, ingest)
        except EngineBuildError:
            self.store.tokens[batch.rows] = SPOILED
            raise

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        try:
            super().move_row(source, destination, num_positions)
        except EngineBuildError:
            self.store.tokens[destination] = SPOILED
            raise


def plain(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(LANGUAGE.logits(tokens).argmax()))
    return tokens[len(prompt) :]


def check_rows(loop: DecodingLoop, target: ToyTarget, drafter: ToyDrafter) -> None:
    """Every position that counts, of requests and of what is kept, holds the token that it should."""
    engines = loop._engines
    for state in loop._rows.occupants:
        for cache, engine in ((engines.target_cache, target), (engines.context.cache, drafter)):
            length = int(cache.committed[state.row])
            assert engine.store.tokens[state.row, :length].tolist() == state.token_ids()[:length].tolist()
    assert loop._prefix_cache is not None
    for row, kept in loop._prefix_cache._retained.items():
        token_ids = kept.token_ids.tolist()
        assert target.store.tokens[row, : len(token_ids)].tolist() == token_ids
        assert drafter.store.tokens[row, : kept.num_context].tolist() == token_ids[: kept.num_context]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data(), config=st.sampled_from(CONFIGS))
def test_every_row_holds_its_requests_own_tokens(data: Any, config: SchedulerConfig) -> None:
    max_requests = data.draw(st.integers(1, 5))
    limits = EngineLimits(max_requests, 96, max_requests + data.draw(st.sampled_from([4, 20, 90])))
    target = SpoilingTarget(LANGUAGE, limits)
    drafter = SpoilingDrafter(LANGUAGE, limits, gamma=3, skill=data.draw(st.sampled_from([1.0, 0.5])))
    engines: dict[str, Any] = {"target": target, "drafter": drafter}
    loop = make_loop(target, drafter, config, table=MODERATE, prefix_cache=True)
    outputs: dict[str, Output] = {}
    requests: dict[str, GenerationRequest] = {}
    cancelled: set[str] = set()
    num_failures, fails = 0, data.draw(st.booleans())
    for event in [*data.draw(st.lists(EVENTS, min_size=10, max_size=40)), "submit"]:
        if event == "submit":
            name = str(len(requests))
            shared = data.draw(st.sampled_from(BEGINNINGS))[: data.draw(st.integers(14, 48))]
            if outputs and data.draw(st.booleans()):  # a conversation goes on
                before = data.draw(st.sampled_from(sorted(outputs)))
                shared = (*requests[before].prompt_ids, *outputs[before].token_ids)[:80]
            prompt = (*shared, *data.draw(st.lists(st.integers(0, 14), max_size=8)))
            requests[name] = GenerationRequest(
                request_id=name,
                prompt_ids=prompt,
                sampling=SamplingParams(max_tokens=data.draw(st.integers(1, 12))),
                max_verify_len=data.draw(st.sampled_from([None, None, 0])),
                cache_salt=data.draw(st.sampled_from(["", "", "", "", "a"])),
            )
            loop.submit(requests[name])
        elif event == "cancel" and requests:
            name = data.draw(st.sampled_from(sorted(requests)))
            if loop.cancel(name):
                cancelled.add(name)
        elif event == "fail" and fails:
            engine, call = data.draw(FAILURES)
            engines[engine].failures.append(call)
            num_failures += 1
        collect(loop, outputs)
        check_rows(loop, target, drafter)
    for _ in range(3000):
        if not loop.has_work:
            break
        collect(loop, outputs)
        check_rows(loop, target, drafter)
    assert not loop.has_work, "every request comes to an end"
    num_prompt_tokens = 0
    for name, request in requests.items():
        output = outputs[name]
        reason = output.last.finish_reason
        assert reason in {"length"} | ({"cancelled"} if name in cancelled else set()) | (
            {"error"} if num_failures else set()
        )
        room = limits.max_seq_len - len(request.prompt_ids) + 1
        expected = plain(request.prompt_ids, min(request.sampling.max_tokens, room))
        assert output.token_ids == (expected if reason == "length" else expected[: len(output.token_ids)])
        statistics = output.last.statistics
        assert statistics is not None
        assert 0 <= statistics.num_prompt_tokens_reused < len(request.prompt_ids)
        num_prompt_tokens += len(request.prompt_ids)
    if not cancelled and not num_failures:
        totals = loop.totals
        assert totals.num_prefill_tokens + totals.num_prompt_tokens_reused == num_prompt_tokens
