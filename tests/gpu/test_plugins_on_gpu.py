"""The compiled kernels of MarkovHead and PrefixSelect on a GPU:
against the references, in CUDA graphs, with poisoned surroundings."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt_plugins.launch import TorchOperation
from dspark_trt_plugins.markov_head.form import EXCLUDED_LOGIT, MarkovHeadForm
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.markov_head.reference import candidates
from dspark_trt_plugins.operation import Operation
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.launches import PrefixSelectOperation
from dspark_trt_plugins.prefix_select.reference import prefix_select

from tests.gpu.cases import assert_drafts_are_right, guarded_inputs, rounded, run_guarded
from tests.gpu.conftest import Compiler
from tests.support.markov_head_cases import random_inputs, random_weights
from tests.support.prefix_select_cases import random_step

pytestmark = pytest.mark.gpu
TEMPERATURES = [0.0, 0.7, 1.0, 0.0, 1e-5, 3.0]
TOLERANCE = {"float32": 5e-5, "float16": 5e-5, "bfloat16": 3e-4}
HEADS: list[tuple[str, int]] = [("vanilla", 0), ("vanilla", 5), ("vanilla", 64), ("gated", 20), ("rnn", 5), ("rnn", 64)]


def temperatures(num_requests: int) -> list[float]:
    return [TEMPERATURES[index % len(TEMPERATURES)] for index in range(num_requests)]


def operation_of(head_type: Any, rank: int, weight_type: Any) -> MarkovHeadOperation:
    return MarkovHeadOperation(MarkovHeadForm(3, 4099, rank, head_type, hidden_size=72, weight_type=weight_type))


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead(compile_for_gpu: Compiler) -> None:
    """The many heads at once; what a single test wants is compiled when it comes."""
    for (head_type, rank), weight_type in itertools.product(HEADS, TOLERANCE):
        compile_for_gpu.start(operation_of(head_type, rank, weight_type))


def runner(operation: Operation, compile_for_gpu: Compiler) -> TorchOperation:
    return TorchOperation(operation, compile_for_gpu(operation))


@pytest.mark.parametrize("num_requests", [1, 17, 70])
@pytest.mark.parametrize("weight_type", TOLERANCE)
@pytest.mark.parametrize(("head_type", "rank"), HEADS)
def test_drafts_of_every_head_and_type_are_right(
    head_type: Any,
    rank: int,
    weight_type: Any,
    num_requests: int,
    compile_for_gpu: Compiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operation = operation_of(head_type, rank, weight_type)
    form = operation.form
    weights, inputs = random_weights(form, 72), random_inputs(form, 72, temperatures(num_requests))
    found = run_guarded(operation, runner(operation, compile_for_gpu), {**weights, **inputs})
    exact = rounded(operation, weights), rounded(operation, inputs)
    assert_drafts_are_right(form, *exact, found, monkeypatch, TOLERANCE[weight_type])


@pytest.mark.parametrize("logits_type", ["float32", "bfloat16"])
def test_drafts_of_a_large_vocabulary_are_right(
    logits_type: Any, compile_for_gpu: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = MarkovHeadForm(7, 151936, 256, "vanilla", hidden_size=4096, weight_type="bfloat16", logits_type=logits_type)
    operation = MarkovHeadOperation(form)
    weights, inputs = random_weights(form, 4096), random_inputs(form, 4096, temperatures(6))
    found = run_guarded(operation, runner(operation, compile_for_gpu), {**weights, **inputs})
    exact = rounded(operation, weights), rounded(operation, inputs)
    assert_drafts_are_right(form, *exact, found, monkeypatch, tolerance=1e-3)


@pytest.mark.parametrize(("head_type", "rank"), [("vanilla", 0), ("vanilla", 20), ("gated", 20), ("rnn", 20)])
@pytest.mark.parametrize("top_n", [5, 300])
def test_top_n_restricts_every_slot_to_its_largest_base_logits(
    head_type: Any, rank: int, top_n: int, compile_for_gpu: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = MarkovHeadForm(3, 9001, rank, head_type, hidden_size=72, weight_type="bfloat16", top_n=top_n)
    operation = MarkovHeadOperation(form)
    weights, inputs = random_weights(form, 72), random_inputs(form, 72, TEMPERATURES)
    inputs["base_logits"] = np.round(inputs["base_logits"])  # equal ones at the edge of the support
    found = run_guarded(operation, runner(operation, compile_for_gpu), {**weights, **inputs})
    exact = rounded(operation, weights), rounded(operation, inputs)
    assert_drafts_are_right(form, *exact, found, monkeypatch, TOLERANCE["bfloat16"])
    is_candidate = candidates(inputs["base_logits"], top_n)
    assert ((found["draft_logits"] != np.float32(EXCLUDED_LOGIT)) == is_candidate).all()


@pytest.mark.parametrize("top_n", [0, 65])
def test_non_finite_values_never_yield_a_token_outside_the_vocabulary(
    top_n: int, compile_for_gpu: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = MarkovHeadForm(5, 300, 4, "gated", hidden_size=72, weight_type="bfloat16", top_n=top_n)
    operation = MarkovHeadOperation(form)
    weights, inputs = random_weights(form, 72), random_inputs(form, 72, TEMPERATURES)
    base = inputs["base_logits"]
    base[:, 0, ::3] = np.nan
    base[:, 1, 1] = np.inf
    base[:, 2] = -np.inf
    base[:, 3] = np.nan
    base[:, 4, :2] = [np.inf, -np.inf]
    inputs["hidden"][:, 3, 5] = np.nan
    found = run_guarded(operation, runner(operation, compile_for_gpu), {**weights, **inputs})
    assert np.isfinite(found["draft_logits"]).all()
    assert (found["draft_ids"][:, 1] == 1).all()
    exact = rounded(operation, weights), rounded(operation, inputs)
    assert_drafts_are_right(form, *exact, found, monkeypatch, TOLERANCE["bfloat16"])


def test_equal_largest_logits_give_the_lowest_id(compile_for_gpu: Compiler) -> None:
    form = MarkovHeadForm(3, 1000, 0, has_confidence_head=False)
    operation = MarkovHeadOperation(form)
    inputs = random_inputs(form, 8, [0.0, 0.0])
    inputs["base_logits"][:, 0, 140:] = 50
    inputs["base_logits"][:, 1, [999, 163]] = 50
    inputs["base_logits"][:, 2] = 1
    found = run_guarded(operation, runner(operation, compile_for_gpu), inputs)
    assert found["draft_ids"].tolist() == [[140, 163, 0]] * 2


def test_the_same_inputs_give_the_same_bits_and_a_cuda_graph_gives_them_too(compile_for_gpu: Compiler) -> None:
    form = MarkovHeadForm(7, 32003, 64, "rnn", hidden_size=72, weight_type="bfloat16")
    operation = MarkovHeadOperation(form)
    run = runner(operation, compile_for_gpu)
    weights = random_weights(form, 72)
    tensors, _ = guarded_inputs(operation, {**weights, **random_inputs(form, 72, temperatures(20), seed=1)})
    static = {name: tensor.value for name, tensor in tensors.items()}
    outputs = {name: tensor.clone() for name, tensor in run(static).items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(static, outputs)
    for seed in (1, 2):
        fresh, _ = guarded_inputs(operation, {**weights, **random_inputs(form, 72, temperatures(20), seed=seed)})
        for name, tensor in fresh.items():
            static[name].copy_(tensor.value)
        graph.replay()
        replayed = {name: tensor.clone() for name, tensor in outputs.items()}
        for name, expected in run(static).items():
            assert torch.equal(replayed[name].view(torch.uint8), expected.view(torch.uint8)), name


@pytest.mark.parametrize("num_requests", [1, 13, 64, 300])
def test_prefix_select_equals_the_reference(num_requests: int, compile_for_gpu: Compiler) -> None:
    form = PrefixSelectForm(7)
    operation = PrefixSelectOperation(form)
    run = runner(operation, compile_for_gpu)
    for seed in range(20):
        inputs = random_step(form, num_requests, seed)
        found = run_guarded(operation, run, inputs)
        for name, expected in prefix_select(form, inputs).items():
            np.testing.assert_array_equal(found[name], expected, err_msg=f"{name}, seed {seed}")


def test_draft_and_select_run_in_one_cuda_graph_without_the_host(compile_for_gpu: Compiler) -> None:
    """What `lagged_budget` is for: from drafting to the packed verification step nothing waits for the host."""
    head = MarkovHeadForm(7, 4099, 64, "vanilla", hidden_size=72, weight_type="bfloat16")
    select = PrefixSelectForm(7)
    head_operation, select_operation = MarkovHeadOperation(head), PrefixSelectOperation(select)
    draft, choose = runner(head_operation, compile_for_gpu), runner(select_operation, compile_for_gpu)
    drafting = {**random_weights(head, 72), **random_inputs(head, 72, temperatures(13))}
    step = random_step(select, 13, seed=5)
    draft_inputs, _ = guarded_inputs(head_operation, drafting)
    select_inputs, _ = guarded_inputs(select_operation, step)
    given = {name: tensor.value for name, tensor in draft_inputs.items()}
    chosen = {name: tensor.value for name, tensor in select_inputs.items()}

    def run() -> dict[str, torch.Tensor]:
        drafted = draft(given)
        made = {name: drafted[name] for name in ("draft_ids", "confidence_logits")}
        return choose({**chosen, **made, "anchor_ids": given["anchor_ids"]}) | made

    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            outputs = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    found = {name: tensor.cpu().numpy() for name, tensor in outputs.items()}
    step |= {name: found[name] for name in ("draft_ids", "confidence_logits")}
    step["anchor_ids"] = drafting["anchor_ids"]
    for name, expected in prefix_select(select, step).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_tensors_that_do_not_fit_are_refused(compile_for_gpu: Compiler) -> None:
    form = PrefixSelectForm(7)
    run = runner(PrefixSelectOperation(form), compile_for_gpu)
    tensors, _ = guarded_inputs(PrefixSelectOperation(form), random_step(form, 3, seed=0))
    inputs = {name: tensor.value for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match="caps: expected a contiguous CUDA tensor"):
        run({**inputs, "caps": inputs["caps"].int()})
    with pytest.raises(ValueError, match="draft_ids: expected shape"):
        run({**inputs, "draft_ids": inputs["draft_ids"][:, :6]})
