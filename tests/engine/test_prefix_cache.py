"""The prefix cache over the rows of real engines: the same drafts and tokens as without it. Over pages:
test_device_loop.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.engine.test_eagle3 import write_pair
from tests.support.conversations import open_pair
from tests.support.device_cases import LIMITS, VOCABULARY, make_pair
from tests.support.toy_engines import make_loop, run

SYSTEM = tuple(np.random.default_rng(3).integers(0, VOCABULARY, 30).tolist())


def block_drafter(folder: Path) -> tuple[Any, Any, Any]:
    pair = make_pair(folder)
    return (*open_pair(pair.target, pair.drafter, folder / "graphs", limits=LIMITS), None)


def eagle3(folder: Path) -> tuple[Any, Any, Any]:
    return (*open_pair(*write_pair(folder, "DeepSpec"), folder / "graphs", limits=LIMITS), None)


def decode(loop: DecodingLoop, blocks: list[Any]) -> tuple[list[list[int]], list[list[int]], int]:
    """Tokens, drafts and reused tokens of two conversations in turn, then of requests that come together (their drafts
    are not told apart)."""
    outputs: list[list[int]] = []
    num_reused = 0

    def ask(*prompts: tuple[int, ...]) -> list[list[int]]:
        nonlocal num_reused
        requests = [
            GenerationRequest(
                request_id=str(at), prompt_ids=prompt, sampling=SamplingParams(max_tokens=20, ignore_eos=True)
            )
            for at, prompt in enumerate(prompts)
        ]
        found = run(loop, requests)
        for request in requests:
            statistics = found[request.request_id].last.statistics
            assert statistics is not None
            num_reused += statistics.num_prompt_tokens_reused
            outputs.append(found[request.request_id].token_ids)
        return outputs[-len(prompts) :]

    turns: list[tuple[int, ...]] = [(*SYSTEM, 1, 2, 3), (*SYSTEM, 4, 5)]
    for _ in range(2):
        turns = [(*turn, *ask(turn)[0], 6, 7) for turn in turns]
    drafts = [ids for ids in blocks if ids is not None]
    ask(*((*SYSTEM, at, at) for at in range(3)))
    return outputs, drafts, num_reused


@pytest.mark.parametrize("open_engines", [block_drafter, eagle3], ids=lambda opener: opener.__name__)
def test_drafts_and_tokens_are_the_same_with_and_without_reuse(open_engines: Any, tmp_path: Path) -> None:
    target, drafter, step = open_engines(tmp_path)
    mode = "fixed" if step is None else "lagged_budget"
    results = []
    for cache in (False, True):
        blocks: list[Any] = []
        loop = make_loop(
            target,
            drafter,
            SchedulerConfig(mode),  # type: ignore[arg-type]
            step_engine=step,
            prefix_cache=cache,
            on_verified=lambda segments, logits, block, blocks=blocks: blocks.append(  # type: ignore[misc]
                None if block is None else np.asarray(block.draft_ids).tolist()
            ),
        )
        results.append(decode(loop, blocks))
    (tokens, drafts, num_reused), (found_tokens, found_drafts, num_found) = results
    assert found_tokens == tokens
    assert found_drafts == drafts, "the drafter's context has no hole"
    assert num_reused == 0
    assert num_found > 28 + 2 * 45 + 2 * 28
