"""Whole decoding loops over the device engines, on the graphs that TensorRT compiles:
the tokens of the ONNX Runtime engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.engines.tensorrt.compiler.profiles import GRAPHS, graph_profiles
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from tests.support.conversations import open_pair
from tests.support.device_cases import (
    HEADS,
    LIMITS,
    VOCABULARY,
    Pair,
    decode,
    device_loop,
    greedy_requests,
    make_pair,
    tokens_of,
)
from tests.support.onnxruntime_device_session import DevicePair, open_device_pair
from tests.support.profile_choice import chosen_profile

MODES = {
    "off": SchedulerConfig("off"),
    "fixed": SchedulerConfig("fixed", verify_len=2),
    "early_stop": SchedulerConfig("early_stop"),
    "lagged_budget": SchedulerConfig("lagged_budget", corrects=False),
}


class Opened:
    """One pair, its device engines and what the ONNX Runtime engines decode with it."""

    def __init__(self, folder: Path, head: str) -> None:
        self.pair: Pair = make_pair(folder, drafter=HEADS[head])
        self.device: DevicePair = open_device_pair(
            self.pair.target, self.pair.drafter, folder / "standard", limits=LIMITS
        )
        engines = open_pair(self.pair.target, self.pair.drafter, folder / "onnxruntime", limits=LIMITS)
        self.expected = tokens_of(decode(*engines, None, MODES["off"]), greedy_requests())

    def loop(self, config: SchedulerConfig) -> DecodingLoop:
        return device_loop(self.device.engines, config)


@pytest.fixture(scope="module", params=["vanilla", "rnn", "no head, no confidence"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(tmp_path_factory.mktemp("pair"), request.param)


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_equal_those_of_the_onnxruntime_engines(opened: Opened, mode: str) -> None:
    num_selections: list[str] = []
    opened.device.select.before_call = lambda tensors: num_selections.append(mode)
    loop = opened.loop(MODES[mode])
    assert tokens_of(loop, greedy_requests()) == opened.expected
    assert loop.totals.num_rows_moved > 0
    if mode != "off":
        assert loop.totals.num_drafts_accepted > 0
    assert bool(num_selections) == (mode == "lagged_budget"), "there the device selects, and nowhere else"


def sampled(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    return [
        replace(each, sampling=replace(each.sampling, temperature=0.9, seed=index))
        for index, each in enumerate(requests)
    ]


def test_sampled_tokens_do_not_depend_on_where_drafts_are_selected(opened: Opened) -> None:
    """Same seeds and same verify lengths: same output. The host's selection and the device's choose alike."""
    engines = opened.device.engines
    fused = device_loop(engines, MODES["lagged_budget"])
    on_host = decode(engines.target, engines.drafter, None, MODES["lagged_budget"], pages=engines.pages)
    outputs = [tokens_of(loop, sampled(greedy_requests())) for loop in (fused, on_host)]
    assert outputs[0] == outputs[1]
    assert fused.totals.num_drafts_verified == on_host.totals.num_drafts_verified > 0


def test_requests_with_equal_seeds_are_verified_at_full_length(opened: Opened) -> None:
    """Equal keys draw equal tokens: such requests are forced in the device's selection too."""
    first = greedy_requests()[2]
    duplicates = [replace(sampled([first])[0], request_id=name) for name in ("one", "other")]
    loop = opened.loop(MODES["lagged_budget"])
    outputs = tokens_of(loop, duplicates)
    assert outputs["one"] == outputs["other"]
    engines = opened.device.engines
    host_loop = decode(engines.target, engines.drafter, None, MODES["lagged_budget"], pages=engines.pages)
    assert tokens_of(host_loop, duplicates) == outputs


def test_a_failed_step_frees_its_rows_and_the_loop_goes_on(opened: Opened) -> None:
    loop = opened.loop(MODES["lagged_budget"])
    opened.device.target.is_failing = True
    loop.submit(greedy_requests()[0])
    loop.step()
    opened.device.target.is_failing = False
    assert not loop.has_work
    assert tokens_of(loop, greedy_requests()) == opened.expected
    assert np.isfinite(loop.last_step.total_ms)


def test_every_call_of_a_loop_fits_a_profile_and_buckets_fit_a_tight_one(opened: Opened) -> None:
    """What TensorRT compiles for is what the runtime asks for; some profiles are for prompt chunks alone."""
    tokens_of(opened.loop(MODES["fixed"]), greedy_requests())
    tokens_of(opened.loop(MODES["lagged_budget"]), greedy_requests())
    device = opened.device
    sessions = (device.target, device.ingest, device.draft, device.select)
    for graph, session in zip(GRAPHS, sessions, strict=True):
        profiles = graph_profiles(graph, device.target_dims, device.drafter_dims)
        assert session.bound_extents
        for extents in session.bound_extents:
            assert not profiles[chosen_profile(profiles, extents)].name.startswith("prefill"), (graph, extents)
        for extents in session.run_extents:
            chosen_profile(profiles, extents)


@pytest.mark.parametrize("mode", ["off", "lagged_budget"])
def test_every_planned_step_is_one_call_of_the_target(opened: Opened, mode: str) -> None:
    """Each call reads all weights, and prompts are one wherever their rows lie."""
    calls: list[int] = []
    opened.device.target.before_call = lambda tensors: calls.append(1)
    loop, of_steps = opened.loop(MODES[mode]), []
    for request in greedy_requests():
        loop.submit(request)
    while loop.has_work:
        calls.clear()
        loop.step()
        of_steps.append(len(calls))
    opened.device.target.before_call = None
    assert set(of_steps) == {1}
    assert len(of_steps) > 20


@pytest.mark.parametrize("mode", MODES)
def test_requests_that_lose_their_pages_get_the_same_tokens(opened: Opened, mode: str) -> None:
    """Three pages of 64 positions: two requests begin in one each, and both grow beyond it. The younger one is read
    again, and its tokens are what they were."""
    requests = [
        GenerationRequest(
            request_id=str(index),
            prompt_ids=tuple(np.random.default_rng(index).integers(0, VOCABULARY, 45 + index).tolist()),
            sampling=SamplingParams(max_tokens=30, ignore_eos=True),
        )
        for index in range(4)
    ]
    # in adaptive modes the schedule decides which draw makes a token of a request that samples
    for each in (requests, sampled(requests)) if mode in ("off", "fixed") else (requests,):
        expected = tokens_of(opened.loop(MODES[mode]), each)
        loop = device_loop(opened.device.engines, MODES[mode], num_pages=4)
        assert tokens_of(loop, each) == expected
        assert loop.totals.num_preempted > 0


@pytest.mark.parametrize("mode", MODES)
def test_prompts_that_begin_alike_share_pages_and_get_the_same_tokens(opened: Opened, mode: str) -> None:
    """Two turns: a page of 64 positions is full before the second one begins."""
    beginning = tuple(np.random.default_rng(1).integers(0, VOCABULARY, 70).tolist())
    requests = [
        GenerationRequest(
            request_id=str(index),
            prompt_ids=(*beginning, *range(index)),
            sampling=SamplingParams(max_tokens=12, ignore_eos=True),
        )
        for index in range(1, 7)
    ]
    expected = tokens_of(opened.loop(MODES[mode]), requests)
    loop = device_loop(opened.device.engines, MODES[mode], prefix_cache=True)
    assert tokens_of(loop, requests) == expected
    assert loop.totals.num_prompt_tokens_reused == 5 * 64
    assert tokens_of(loop, [replace(each, request_id=f"again {each.request_id}") for each in requests]) == {
        f"again {name}": tokens for name, tokens in expected.items()
    }
    assert loop.totals.num_prompt_tokens_reused == 11 * 64
