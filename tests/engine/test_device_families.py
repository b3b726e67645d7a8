"""EAGLE-3, language models, PARD and Medusa on the device runtime, over ONNX Runtime with the graphs that TensorRT
compiles: drafts and logits equal to oracles that share nothing with them, and whole loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.contract import bindings
from dspark_trt.contract.protocol import DraftBatch, DraftEngine, DraftOutput, IngestBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.engines.device.warm_up import warm_up
from dspark_trt.engines.tensorrt.compiler.profiles import graph_profiles
from dspark_trt.reference.engines import open_reference_engines
from tests.engine import test_dart as dart
from tests.engine import test_eagle3 as eagle3
from tests.engine import test_language_model as language_model
from tests.engine import test_medusa as medusa
from tests.engine import test_mtp as mtp
from tests.engine.test_onnxruntime_drafter import LIMITS, Contexts, assert_same_drafts
from tests.support.conversations import open_pair, read_pair
from tests.support.device_cases import LIMITS as SMALL_LIMITS
from tests.support.device_cases import VOCABULARY, Pair, check_distribution, decode, device_loop, tokens_of
from tests.support.eagle3_dialects import write_eagle3
from tests.support.factories import write_target
from tests.support.family_checks import check_a_model_that_drafts_for_itself, check_first_drafts
from tests.support.gemma4 import write_gemma_eagle3, write_gemma_target
from tests.support.medusa_forms import MedusaOracle
from tests.support.onnxruntime_device_session import DevicePair, open_device_pair, spoil
from tests.support.profile_choice import chosen_profile

Opened = tuple[TargetCheckpoint, DrafterCheckpoint, DraftEngine]


def of_eagle3(folder: Path, case: str) -> Opened:
    target, drafter = eagle3.write_pair(folder, case)
    return target, drafter, open_reference_engines(target, drafter, limits=LIMITS)[1]


def of_other_layer(folder: Path, case: str) -> Opened:
    """The same graphs in forms that other drafters of one layer have."""
    if case == "MTP":
        pair = mtp.open_mimo(mtp.write_mimo(folder / "target"), num_drafts=3)
        target, drafter = pair.target, pair.drafter
    elif case == "DART":
        path = write_target(folder / "target", family="qwen3")
        target, drafter = read_pair(path, write_eagle3(folder / "drafter", path, "dart", extra=dart.TAPS))
    else:
        path = write_gemma_target(folder / "target")
        target, drafter = read_pair(path, write_gemma_eagle3(folder / "drafter", path))
    return target, drafter, open_reference_engines(target, drafter, limits=LIMITS)[1]


def of_language_model(folder: Path, case: str) -> Opened:
    target, drafter = language_model.write_pair(folder, case)
    return target, drafter, language_model.oracle(folder, drafter)


def of_medusa(folder: Path, case: str) -> Opened:
    target, drafter, heads = medusa.write_pair(folder, case)
    return target, drafter, MedusaOracle(heads, LIMITS, drafter.draft_ids)


FAMILIES: dict[str, tuple[Callable[[Path, str], Opened], tuple[str, ...]]] = {
    "eagle3": (of_eagle3, ("DeepSpec", "SpecForge", "speculators, 3.1")),
    "other layers": (of_other_layer, ("DART", "MTP", "Gemma 4")),
    "language model": (of_language_model, ("qwen3, tied", "fewer ids", "more ids")),
    "PARD": (of_language_model, ("PARD", "PARD, tied, more ids")),
    "medusa": (of_medusa, ("Medusa", "vLLM, one matrix", "vLLM, token map")),
}
CASES = [(family, case) for family, (_, cases) in FAMILIES.items() for case in cases]


class Devices:
    """A pair on device engines and the oracle of its drafter."""

    def __init__(self, folder: Path, family: str, case: str) -> None:
        self.target, self.drafter, self.oracle = FAMILIES[family][0](folder, case)
        self.graphs = folder / "standard"
        self.pair: DevicePair = open_device_pair(self.target, self.drafter, self.graphs, limits=LIMITS)
        self.engine = self.pair.engines.drafter
        width = self.pair.drafter_dims.tap_width
        self.contexts = Contexts(self.engine, self.oracle, tap_width=width, seed=sum(case.encode()))

    def spoil(self) -> None:
        spoil(self.pair, np.zeros(LIMITS.max_requests, np.int64), self.contexts.lengths)

    def ingest(self, rows: list[int], query: list[int]) -> None:
        self.spoil()
        self.contexts.ingest(rows, query)

    def check(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> None:
        """The oracle has columns for the ids that it can propose alone."""
        self.spoil()
        expected, output = self.oracle.draft(batch, ingest), self.engine.draft(batch, ingest)
        ids, logits = self.drafter.draft_ids, np.asarray(output.draft_logits)
        if ids is not None:
            others = np.setdiff1d(np.arange(logits.shape[-1]), ids)
            assert logits[..., others].max() < -1e29
            logits = logits[..., ids]
        found = DraftOutput(np.asarray(output.draft_ids), logits, np.asarray(output.confidence_logits))
        assert_same_drafts(found, expected)

    def without_first_of(self, lengths: list[int], rows: list[int]) -> IngestBatch:
        """An ingest that no engine has made yet."""
        ingested: list[IngestBatch] = []
        engines, self.contexts.engines = self.contexts.engines, (SimpleNamespace(ingest=ingested.append),)  # type: ignore[assignment]
        self.contexts.ingest(rows, lengths)
        self.contexts.engines = engines
        return ingested[0]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_drafts_equal_the_oracle_over_steps_with_rejections_moves_and_reuse(
    family: str, case: str, tmp_path: Path
) -> None:
    devices = Devices(tmp_path, family, case)
    contexts = devices.contexts
    for index in range(6):
        rows = contexts.random.permutation(LIMITS.max_requests)[: contexts.random.integers(1, LIMITS.max_requests + 1)]
        if index == 4:
            contexts.lengths[rows[0]] = contexts.next_ids[rows[0]] = 0  # another request takes the row
        # prompts, and what a verification commits; what a block wrote behind the context is overwritten
        longest = 3 if index % 2 else 14
        devices.ingest(rows.tolist(), contexts.random.integers(1, longest, len(rows)).tolist())
        block = contexts.block(rows.tolist())
        num_slots = (block.uniforms.shape[1], 2, 1)[index % 3]
        devices.check(replace(block, uniforms=block.uniforms[:, :num_slots]))
    if len(free := [row for row in range(LIMITS.max_requests) if row not in rows]):
        source, destination = int(rows[0]), free[0]
        for engine in contexts.engines:
            engine.move_row(source, destination, int(contexts.lengths[source]))
        for each in (contexts.lengths, contexts.next_ids):
            each[destination] = each[source]
        devices.check(contexts.block([destination]))


@pytest.mark.parametrize(("family", "case"), [(family, cases[0]) for family, (_, cases) in FAMILIES.items()])
def test_what_is_handed_over_with_a_draft_is_ingested(family: str, case: str, tmp_path: Path) -> None:
    """With rows that do not draft among them; a prompt too."""
    devices = Devices(tmp_path, family, case)
    devices.ingest([0, 1, 2, 3], [3, 1, 2, 1])
    for rows, lengths in (([3, 0, 2], [2, 4, 1]), ([1, 3, 0], [20, 1, 2]), ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])):
        ingest = devices.without_first_of(lengths, rows)
        devices.check(devices.contexts.block(rows[:2]), ingest)
    devices.check(devices.contexts.block([4, 2]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["lagged_budget", "auto"])
def test_greedy_tokens_equal_those_of_the_onnxruntime_engines(family: str, mode: str, opened: Any) -> None:
    devices, expected = opened(family)
    assert not devices.pair.engines.pages.holds_context, "it stands in rows of its own"
    loop = device_loop(devices.pair.engines, SchedulerConfig(mode))  # type: ignore[arg-type]
    assert tokens_of(loop, language_model.requests()) == expected
    assert loop.totals.num_drafts_verified > loop.totals.num_drafts_accepted


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Devices, dict[str, list[int]]]]:
    """The first case of a family, and what the ONNX Runtime engines decode without drafts."""
    known: dict[str, tuple[Devices, dict[str, list[int]]]] = {}

    def get(family: str) -> tuple[Devices, dict[str, list[int]]]:
        if family not in known:
            folder = tmp_path_factory.mktemp("pair")
            devices = Devices(folder, family, FAMILIES[family][1][0])
            engines = open_pair(devices.target, devices.drafter, folder / "onnxruntime", limits=LIMITS)
            plain = decode(*engines, None, SchedulerConfig("off"))
            known[family] = devices, tokens_of(plain, language_model.requests())
        return known[family]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_of_a_loop_fits_a_profile_and_buckets_fit_a_tight_one(family: str, opened: Any) -> None:
    devices, _ = opened(family)
    device = devices.pair
    assert warm_up(device.engines) > 10
    sessions = {bindings.INGEST_GRAPH: device.ingest, bindings.DRAFT_GRAPH: device.draft}
    if device.ingest is None:
        sessions = {bindings.MODEL_GRAPH: device.draft}
    dims = device.drafter_dims
    for graph, session in sessions.items():
        profiles = graph_profiles(graph, device.target_dims, dims)
        assert session is not None
        assert session.bound_extents
        for extents in session.bound_extents:
            assert not profiles[chosen_profile(profiles, extents)].name.startswith("prefill"), (graph, extents)
        for extents in session.run_extents:
            chosen_profile(profiles, extents)


def test_a_target_that_drafts_for_itself_accepts_every_draft(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", family="qwen3", vocab_size=VOCABULARY)
    pair = read_pair(folder, folder)
    check_a_model_that_drafts_for_itself(open_device_pair(*pair, tmp_path / "graphs", limits=SMALL_LIMITS).engines, 1.0)


def test_first_drafts_are_near_the_oracles_as_a_gpu_has_to_have_them(tmp_path: Path) -> None:
    devices = Devices(tmp_path, "eagle3", "SpecForge")
    check_first_drafts(devices.pair.engines, devices.oracle, devices.contexts, 1e-4)


@pytest.mark.parametrize("family", ["eagle3", "language model"])
def test_sampled_texts_of_fused_steps_have_the_targets_distribution(family: str, tmp_path: Path) -> None:
    """Chi-square over all texts of three tokens of five ids, of which the drafter proposes three or four; the device
    accepts over a column for each of the five."""
    target = write_target(tmp_path / "target", family="qwen3", vocab_size=5)
    if family == "eagle3":
        drafter = write_eagle3(tmp_path / "drafter", target, "community", draft_ids=np.array([0, 2, 3]))
    else:
        drafter = write_target(tmp_path / "drafter", **language_model.SMALL, vocab_size=4, eos_token_ids=(2,))
    pair = Pair(*read_pair(target, drafter))
    device = open_device_pair(pair.target, pair.drafter, tmp_path / "graphs", limits=SMALL_LIMITS)
    check_distribution(device.engines, pair, SchedulerConfig("lagged_budget"), num_samples=500)
