"""Any mixture of growing, sharing, moving and leaving: no page twice, none lost, what is shared is never written again;
and any mixture of requests over few pages: everyone gets the target's greedy tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.contract.protocol import EngineLimits, PageLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.pages import NO_PAGE, BlockTables
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.support.toy_engines import Output, ToyLanguage, collect
from tests.support.toy_pages import PAGE_POSITIONS, paged_loop

LIMITS = PageLimits(num_pages=14, page_positions=4, table_width=6, num_block_positions=3)
NUM_ROWS = 4
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "grow", "release", "share", "move", "name", "forget"]), st.integers(0, 99)
    ),
    max_size=60,
)


@given(EVENTS)
@settings(max_examples=150, deadline=None)
def test_no_page_belongs_to_two_rows_but_shared_ones_and_none_is_lost(events: list[tuple[str, int]]) -> None:
    tables = BlockTables(LIMITS, num_rows=NUM_ROWS)
    content: dict[int, str] = {}  # what a page holds, by its key
    for number, (event, value) in enumerate(events):
        row = value % NUM_ROWS
        pages = tables.pages_of(row)
        if event == "grow":
            num_positions = value % (LIMITS.table_width * 4) + 1
            num_free, missing = tables.pool.num_free, tables.num_missing(row, num_positions)
            assert tables.grow(row, num_positions) == (missing <= num_free)
            if missing <= num_free:
                assert tables.pool.num_free == num_free - missing
                assert tables.pages_of(row)[: len(pages)] == pages, "what a row has stays where it is"
                for page in tables.pages_of(row)[len(pages) :]:
                    assert page != NO_PAGE
                    content.pop(page, None)
            else:
                assert tables.pages_of(row) == pages
        elif event == "release":
            tables.release(row)
        elif event == "name" and pages:
            page, key = pages[value % len(pages)], f"{number}"
            if page not in content:
                tables.pool.name(page, key)
                content[page] = key
        elif event == "share" and content and not pages:
            page = sorted(content)[value % len(content)]
            if tables.pool.find(content[page]) == page:
                tables.begin(row, [page])
                assert tables.pages_of(row) == [page]
        elif event == "move":
            destination = (row + 1) % NUM_ROWS
            if not tables.pages_of(destination):
                tables.move(row, destination)
                assert tables.pages_of(destination) == pages
        elif event == "forget":
            tables.pool.forget()
            content = {}
        tables.check_integrity(NUM_ROWS)
        for page, key in content.items():
            assert tables.pool.find(key) in (page, NO_PAGE)
    for row in range(NUM_ROWS):
        tables.release(row)
    assert tables.pool.num_free == LIMITS.num_pages - 1


LANGUAGE = ToyLanguage(vocab_size=16, order=3, num_patterns=499)
LOOP_LIMITS = EngineLimits(max_requests=3, max_seq_len=28, max_batch_tokens=12)
WIDTH = -(-(28 + 5) // PAGE_POSITIONS)
CONFIGS = [SchedulerConfig("off"), SchedulerConfig("fixed"), SchedulerConfig("early_stop"), SchedulerConfig("auto")]
BEGINNINGS = [tuple(np.random.default_rng(seed).integers(0, 15, 20).tolist()) for seed in range(2)]


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["step", "step", "submit", "submit", "cancel", "fail"]), st.integers(0, 999)),
        min_size=10,
        max_size=50,
    ),
    config=st.sampled_from(CONFIGS),
    num_pages=st.integers(WIDTH + 1, 2 * WIDTH + 2),
    prefix_cache=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_requests_over_few_pages_get_the_targets_tokens(
    events: list[tuple[str, int]], config: SchedulerConfig, num_pages: int, prefix_cache: bool
) -> None:
    loop = paged_loop(LANGUAGE, LOOP_LIMITS, config, num_pages=num_pages, prefix_cache=prefix_cache)
    outputs: dict[str, Output] = {}
    prompts: dict[str, tuple[int, ...]] = {}
    for number, (event, value) in enumerate(events):
        if event == "submit":
            name, beginning = str(number), BEGINNINGS[value % 2]
            prompts[name] = (*beginning[: 1 + value % 20], value % 13)
            sampling = SamplingParams(max_tokens=1 + value % 9, ignore_eos=True)
            loop.submit(GenerationRequest(request_id=name, prompt_ids=prompts[name], sampling=sampling))
        elif event == "cancel" and loop.request_ids:
            loop.cancel(loop.request_ids[value % len(loop.request_ids)])
        else:
            if event == "fail":
                drafter: Any = loop._engines.drafter
                target: Any = loop._engines.target
                if value % 2 or drafter is None:
                    target.failures = ["forward"]
                else:
                    drafter.failures = [("draft", "ingest")[value // 2 % 2]]
            collect(loop, outputs)
    engines: tuple[Any, ...] = (loop._engines.target, loop._engines.drafter)
    for engine in engines:
        if engine is not None:
            engine.failures = []
    for _ in range(10_000):
        if not loop.has_work:
            break
        collect(loop, outputs)
    assert not loop.has_work, "the loop does not come to an end"
    for name, output in outputs.items():
        tokens = list(prompts[name])
        for found in output.token_ids:
            tokens.append(int(LANGUAGE.logits(tokens).argmax()))
            assert found == tokens[-1]
        if output.last.finish_reason == "length":
            assert len(output.token_ids) >= 1
    tables = loop._engines.tables
    assert tables is not None
    assert tables.pool.num_free == num_pages - 1
