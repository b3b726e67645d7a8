"""The PyTorch sessions of the device runtime against the `paged` graphs in ONNX Runtime, on the very same tensors.

Some rows are idle, everything is padded, and what is padding is poisoned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dspark_trt.checkpoints.families import FULL, SLIDING
from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import DrafterDims, TargetDims, drafter_dims, target_dims
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.select_bindings import select_inputs, select_outputs
from dspark_trt.errors import EngineBuildError
from dspark_trt.reference.draft_session import TorchDraftSession
from dspark_trt.reference.sequential import TorchSelectSession
from dspark_trt.reference.sessions import TorchIngestSession, TorchTargetSession
from dspark_trt.reference.weights import ReferenceWeights
from tests.support.conversations import read_pair
from tests.support.factories import write_drafter, write_target
from tests.support.onnxruntime_device_session import write_device_graphs
from tests.support.session_calls import (
    POISONS,
    Poison,
    Tensors,
    caches_of,
    copied,
    draft_call,
    held,
    ingest_call,
    run_graph,
    target_call,
)

LIMITS = EngineLimits(max_requests=6, max_seq_len=48, max_batch_tokens=32)
TAPS = (-1, 0, 3)
TOLERANCE = 1e-4
DECODE = ((0, 0), (17, 3), (47, 1), (0, 0), (4, 6), (30, 2))  # rows 0 and 3 are idle
PREFILL = ((0, 9), (12, 2))
CONTEXT = ((5, 4), (0, 0), (0, 7), (40, 8))
DRAFT = {"past_lengths": (9, 43, 1), "temperatures": (0.0, 0.8, 1.3)}
HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "vanilla, confidence without Markov": {"confidence_with_markov": False, "confidence_bias": False},
    "gated": {"head_type": "gated", "embed_head": "different"},
    "rnn": {"head_type": "rnn", "kv_heads": 4},
    "no head": {"markov_rank": 0},
    "no confidence": {"confidence": False},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tied": True, "biases": True},
    "qwen3": {"family": "qwen3"},
    "llama windows": {"config_extra": {"layer_types": [FULL, SLIDING] * 2, "sliding_window": 3}},
    "llama linear": {"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "kv_heads": 1},
}
RELATIVE_ERROR = {"bfloat16": 0.03, "float16": 0.004}  # of the root mean square, with 8 and 11 bits of mantissa


class Pair(NamedTuple):
    """Both checkpoints, and the sessions of one element type."""

    target: TargetCheckpoint
    drafter: DrafterCheckpoint
    element_type: Any = "float32"

    def target_dims(self) -> TargetDims:
        return target_dims(
            self.target.spec,
            num_taps=self.drafter.spec.num_taps,
            limits=LIMITS,
            attention="paged",
            element_type=self.element_type,
        )

    def drafter_dims(self) -> DrafterDims:
        return drafter_dims(self.drafter.spec, limits=LIMITS, attention="paged", element_type=self.element_type)

    def weights(self, checkpoint: TargetCheckpoint | DrafterCheckpoint) -> ReferenceWeights:
        return ReferenceWeights(checkpoint.weights, "cpu", getattr(torch, self.element_type))

    def target_session(self) -> TorchTargetSession:
        spec, weights = self.drafter.spec, self.weights(self.target)
        norm = spec.is_last_tap_normed
        return TorchTargetSession(
            self.target.spec, weights, self.target_dims(), spec.target_layer_ids, norm_last_tap=norm
        )

    def ingest_session(self) -> TorchIngestSession:
        return TorchIngestSession(self.drafter.spec, self.weights(self.drafter), self.drafter_dims())

    def draft_session(self) -> TorchDraftSession:
        return TorchDraftSession(
            self.drafter.spec,
            self.weights(self.drafter),
            self.drafter_dims(),
            target_spec=self.target.spec,
            target_weights=self.weights(self.target),
        )


def write_pair(folder: Path, family: dict[str, Any] | None = None, head: dict[str, Any] | None = None) -> Pair:
    target = write_target(folder / "target", **(family or FAMILIES["qwen3"]))
    return Pair(*read_pair(target, write_drafter(folder / "drafter", target, taps=TAPS, **(head or {}))))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def target_tensors(dims: TargetDims, poison: Poison = POISONS[1]) -> Tensors:
    return target_call(dims, DECODE, PREFILL, num_tokens=32, num_queries=(6, 10), poison=poison)


def ingest_tensors(dims: DrafterDims, poison: Poison = POISONS[1], scale: float = 1.0) -> Tensors:
    return ingest_call(dims, CONTEXT, num_tokens=32, num_queries=8, poison=poison, scale=scale)


def assert_close(found: Tensors, expected: Tensors, names: list[str]) -> None:
    for name in names:
        kept = slice(1 if bindings.is_cache(name) else 0, None)  # page 0 is nobody's
        torch.testing.assert_close(
            found[name][kept], expected[name][kept], atol=TOLERANCE, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_equals_its_graph(family: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, FAMILIES[family])
    write_device_graphs(pair.target, pair.drafter, tmp_path / "graphs", limits=LIMITS)
    tensors = target_tensors(pair.target_dims())
    expected = copied(tensors)
    pair.target_session().run(tensors)
    run_graph(tmp_path / "graphs" / bindings.TARGET_GRAPH, expected)
    assert_close(tensors, expected, [bindings.LOGITS, bindings.TAPS, *caches_of(tensors)])
    assert tensors[bindings.LOGITS].isfinite().all()


@pytest.mark.parametrize("head", HEADS)
def test_the_drafter_equals_its_graphs(head: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, head=HEADS[head])
    graphs = tmp_path / "graphs"
    write_device_graphs(pair.target, pair.drafter, graphs, limits=LIMITS)
    ingested = ingest_tensors(pair.drafter_dims())
    expected = copied(ingested)
    pair.ingest_session().run(ingested)
    run_graph(graphs / bindings.INGEST_GRAPH, expected)
    assert_close(ingested, expected, list(caches_of(ingested)))
    drafted = draft_call(pair.drafter_dims(), **DRAFT, poison=POISONS[1])
    expected = copied(drafted)
    pair.draft_session().run(drafted)
    run_graph(graphs / bindings.DRAFT_GRAPH, expected)
    assert drafted[bindings.DRAFT_IDS].tolist() == expected[bindings.DRAFT_IDS].tolist()
    names = [bindings.DRAFT_LOGITS, *caches_of(drafted)]
    assert_close(drafted, expected, [*names, bindings.CONFIDENCE_LOGITS])


def test_padding_and_what_lies_behind_the_valid_positions_change_nothing(pair: Pair) -> None:
    """Real outputs are equal bit for bit, whatever stands in padding, in idle rows and behind a row's length."""
    session, dims = pair.target_session(), pair.target_dims()
    calls = [target_tensors(dims, poison) for poison in POISONS]
    num_real = sum(query for _, query in (*DECODE, *PREFILL))
    for call in calls:
        session.run(call)
    for name in (bindings.LOGITS, bindings.TAPS):
        assert torch.equal(calls[0][name][:num_real], calls[1][name][:num_real]), name
    for group, rows in ((bindings.DECODE, DECODE), (bindings.PREFILL, PREFILL)):
        for row, (past, query) in enumerate(rows):
            table = calls[0][bindings.group_block_tables(group)][row]
            assert torch.equal(*(held(call[bindings.page_cache(3)], table, past + query) for call in calls))
    drafts = [draft_call(pair.drafter_dims(), **DRAFT, poison=poison) for poison in POISONS]
    for draft in drafts:
        pair.draft_session().run(draft)
    for name in (bindings.DRAFT_IDS, bindings.DRAFT_LOGITS, bindings.CONFIDENCE_LOGITS):
        assert torch.equal(drafts[0][name], drafts[1][name]), name


def test_nothing_is_written_but_where_tokens_go_and_in_page_0(pair: Pair) -> None:
    tensors = target_tensors(pair.target_dims())
    pool = tensors[bindings.page_cache(1)]
    before = pool.clone()
    pair.target_session().run(tensors)
    is_written = (pool != before).any(-1).any(1).any(1)  # [P, page_positions]
    assert is_written[1:].sum() == sum(query for _, query in (*DECODE, *PREFILL))
    assert is_written[0].any(), "padding"


def test_a_call_can_ask_for_no_logits(pair: Pair) -> None:
    dims = pair.target_dims()
    tensors, some = target_tensors(dims), target_tensors(dims)
    pair.target_session().run(tensors)
    some[bindings.LOGIT_ROWS] = some[bindings.LOGIT_ROWS][:0]
    some[bindings.LOGITS] = some[bindings.LOGITS][:0]
    pair.target_session().run(some)
    assert torch.equal(some[bindings.TAPS], tensors[bindings.TAPS])


@pytest.mark.parametrize("element_type", RELATIVE_ERROR)
def test_16_bit_sessions_are_close_to_float32(pair: Pair, element_type: Any) -> None:
    """Root mean square of the difference over that of the values."""
    half = pair._replace(element_type=element_type)
    dtype = getattr(torch, element_type)

    def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
        error = (found.float() - expected.float()).square().mean().sqrt() / expected.float().square().mean().sqrt()
        assert error < RELATIVE_ERROR[element_type]

    wide = target_tensors(pair.target_dims(), POISONS[0])
    narrow = copied(wide, element_type=dtype)
    pair.target_session().run(wide)
    half.target_session().run(narrow)
    assert narrow[bindings.LOGITS].dtype == torch.float32
    for name in (bindings.LOGITS, bindings.TAPS, bindings.page_cache(3)):
        assert_near(narrow[name], wide[name])
    wide = ingest_tensors(pair.drafter_dims(), POISONS[0])
    narrow = copied(wide, element_type=dtype)
    pair.ingest_session().run(wide)
    half.ingest_session().run(narrow)
    for name in caches_of(wide):
        assert_near(narrow[name][1:], wide[name][1:])
    wide = draft_call(pair.drafter_dims(), **DRAFT | {"temperatures": (0.0, 0.0, 0.0)})
    narrow = copied(wide, element_type=dtype)
    pair.draft_session().run(wide)
    half.draft_session().run(narrow)
    assert_near(narrow[bindings.DRAFT_LOGITS][:, 0], wide[bindings.DRAFT_LOGITS][:, 0])  # before drafts part ways
    assert_near(narrow[bindings.CONFIDENCE_LOGITS][:, 0], wide[bindings.CONFIDENCE_LOGITS][:, 0])


def test_massive_taps_do_not_overflow_float16(pair: Pair) -> None:
    """`fc` carries them beyond 65504; it and its norm are float32 in fp16."""
    half = pair._replace(element_type="float16")
    wide = ingest_tensors(pair.drafter_dims(), POISONS[0], scale=1.8e4)
    wide[bindings.TAPS].clamp_(-6e4, 6e4)
    narrow = copied(wide, element_type=torch.float16)
    fc = wide[bindings.TAPS] @ pair.weights(pair.drafter)["fc.weight"].T
    assert fc.abs().max() > torch.finfo(torch.float16).max
    pair.ingest_session().run(wide)
    half.ingest_session().run(narrow)
    for name in caches_of(wide):
        torch.testing.assert_close(narrow[name][1:].float(), wide[name][1:], atol=0.05, rtol=0.01)


def test_a_bound_call_works_on_the_tensors_it_was_given(pair: Pair) -> None:
    session, dims = pair.draft_session(), pair.drafter_dims()
    tensors = draft_call(dims, **DRAFT)
    call = session.bind(tensors)
    session.run(draft_call(dims, **DRAFT, seed=9))
    call()
    first = tensors[bindings.DRAFT_LOGITS].clone()
    tensors[bindings.ANCHOR_IDS].copy_(torch.tensor([5, 6, 7]))
    call()
    assert not torch.equal(tensors[bindings.DRAFT_LOGITS], first)
    expected = draft_call(dims, **DRAFT)
    expected[bindings.ANCHOR_IDS] = torch.tensor([5, 6, 7])
    session.run(expected)
    assert torch.equal(tensors[bindings.DRAFT_LOGITS], expected[bindings.DRAFT_LOGITS])


def test_a_call_that_pytorch_refuses_is_an_error_of_ours(pair: Pair) -> None:
    tensors = target_tensors(pair.target_dims())
    tensors[bindings.POSITIONS] = tensors[bindings.POSITIONS][:-1]
    with pytest.raises(EngineBuildError, match=r"target.onnx: PyTorch .* failed"):
        pair.target_session().run(tensors)
    select = TorchSelectSession(pair.drafter_dims(), "cpu")
    with pytest.raises(EngineBuildError, match=r"prefix_select.onnx: PyTorch"):
        select.run(
            {
                binding.name: torch.ones([3] * len(binding.shape), dtype=getattr(torch, binding.element_type))
                for binding in (
                    *select_inputs(pair.drafter_dims()),
                    *select_outputs(pair.drafter_dims()),
                )
            }
        )
