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
from dspark_trt.runtime.request import GenerationRequest
from tests.support.conversations import open_pair
from tests.support.device_cases import HEADS, LIMITS, Pair, decode, device_loop, greedy_requests, make_pair, tokens_of
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
    on_host = decode(engines.target, engines.drafter, None, MODES["lagged_budget"])
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
    host_loop = decode(opened.device.engines.target, opened.device.engines.drafter, None, MODES["lagged_budget"])
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
    """What TensorRT compiles for is what the runtime asks for; the widest profile is for prompt chunks."""
    tokens_of(opened.loop(MODES["fixed"]), greedy_requests())
    tokens_of(opened.loop(MODES["lagged_budget"]), greedy_requests())
    device = opened.device
    sessions = (device.target, device.ingest, device.draft, device.select)
    for graph, session in zip(GRAPHS, sessions, strict=True):
        profiles = graph_profiles(graph, LIMITS, opened.pair.gamma)
        assert session.bound_extents
        for extents in session.bound_extents:
            assert chosen_profile(profiles, extents) < max(len(profiles) - 1, 1), (graph, extents)
        for extents in session.run_extents:
            chosen_profile(profiles, extents)
