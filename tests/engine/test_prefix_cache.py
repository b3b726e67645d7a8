"""The prefix cache over real engines: the same drafts and tokens as without it, and nothing left of others in a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.engine.test_eagle3 import write_pair
from tests.support.conversations import open_pair
from tests.support.device_cases import LIMITS, VOCABULARY, make_pair
from tests.support.onnxruntime_device_session import open_device_pair
from tests.support.toy_engines import make_loop, run

SYSTEM = tuple(np.random.default_rng(3).integers(0, VOCABULARY, 30).tolist())


def block_drafter(folder: Path) -> tuple[Any, Any, Any]:
    pair = make_pair(folder)
    return (*open_pair(pair.target, pair.drafter, folder / "graphs", limits=LIMITS), None)


def eagle3(folder: Path) -> tuple[Any, Any, Any]:
    return (*open_pair(*write_pair(folder, "DeepSpec"), folder / "graphs", limits=LIMITS), None)


def device(folder: Path) -> tuple[Any, Any, Any]:
    pair = make_pair(folder)
    engines = open_device_pair(pair.target, pair.drafter, folder / "graphs", limits=LIMITS).engines
    return engines.target, engines.drafter, engines.step


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


@pytest.mark.parametrize("open_engines", [block_drafter, eagle3, device], ids=lambda opener: opener.__name__)
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


def test_a_row_of_a_device_keeps_nothing_of_others_behind_a_reused_prefix(tmp_path: Path) -> None:
    """Attention without the plugin reads whole rows: 0 * NaN is NaN."""
    target, _, _ = device(tmp_path)
    pool = target.cache._pools[0]
    prefix = torch.randn_like(pool[:, :, 1, :, :8])
    for source, destination in ((1, 1), (1, 2)):
        pool[:, :, 1, :, :8] = prefix
        for row in {source, destination}:
            pool[:, :, row, :, 8:20] = torch.nan
            target.cache._written[row] = 20
        target.move_row(source, destination, 8)
        assert torch.equal(pool[:, :, destination, :, :8], prefix)
        assert not pool[:, :, destination, :, 8:].any()
