"""The compiled kernels of RowAttention on a GPU: against the reference, in a CUDA graph, with poisoned surroundings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt_plugins.launch import TorchOperation
from dspark_trt_plugins.operation import workspace_offsets
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation
from dspark_trt_plugins.row_attention.reference import row_attention

from tests.gpu.cases import POISON_BYTE, guarded_inputs, run_guarded
from tests.gpu.conftest import Compiler
from tests.support.row_attention_cases import TOLERANCE, Arrays, Rows, attention_form, random_call

pytestmark = pytest.mark.gpu
HEADS = [
    (32, 8, 128),
    (9, 3, 64),
    (8, 8, 64),
    (64, 8, 128),
    (8, 2, 80),
    (8, 2, 96),
    (8, 2, 256),
    (4, 2, 16),
    (16, 1, 32),
]
PROMPT_HEADS = [(4, 1, 128), (9, 3, 64)]  # of several blocks of queries, the last one not full
PROMPT_SLOTS = 512
LAST_POSITIONS = [0, 1, 15, 63, 64, 127, 128, 254, 255, 256, 257, 511, 512, 1100, 2047, 4095, 4096, 4590]


def operation_of(
    heads: tuple[int, int, int], element_type: Any, num_chunk_slots: int = 0, *, is_causal: bool = True
) -> RowAttentionOperation:
    form = attention_form(*heads, 4608, 8, element_type, num_chunk_slots=num_chunk_slots, is_causal=is_causal)
    return RowAttentionOperation(form)


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead(compile_for_gpu: Compiler) -> None:
    for heads in HEADS:
        for element_type in TOLERANCE:
            compile_for_gpu.start(operation_of(heads, element_type))
            compile_for_gpu.start(operation_of(heads, element_type, is_causal=False))
    for heads in PROMPT_HEADS:
        for element_type in TOLERANCE:
            compile_for_gpu.start(operation_of(heads, element_type, PROMPT_SLOTS))


def runner(operation: RowAttentionOperation, compile_for_gpu: Compiler) -> TorchOperation:
    return TorchOperation(operation, compile_for_gpu(operation))


def poison_free_memory(operation: RowAttentionOperation, inputs: Arrays) -> None:
    """What the next call is likely to get as its workspace: NaN throughout."""
    _, size = workspace_offsets(operation.workspace, {})
    poisoned = torch.full((size,), POISON_BYTE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del poisoned


def assert_right(operation: RowAttentionOperation, run: TorchOperation, inputs: Arrays) -> None:
    poison_free_memory(operation, inputs)
    found = run_guarded(operation, run, inputs)["attended"]
    expected = row_attention(operation.form, **inputs)
    tolerance = TOLERANCE[operation.form.element_type]
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_slots", [1, 7, 8])
@pytest.mark.parametrize("element_type", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_grouping_of_heads_and_every_type(
    heads: tuple[int, int, int], element_type: Any, num_slots: int, compile_for_gpu: Compiler
) -> None:
    operation = operation_of(heads, element_type)
    run = runner(operation, compile_for_gpu)
    for past_lengths in ([0], [300, 0, 4596], [17, 1500, 0, 250]):
        assert_right(operation, run, random_call(operation.form, Rows.alike(past_lengths, num_slots)))
    blocks = operation_of(heads, element_type, is_causal=False)
    call = random_call(blocks.form, Rows.alike([900, 0, 2], num_slots))
    assert_right(blocks, runner(blocks, compile_for_gpu), call)


@pytest.mark.parametrize("element_type", TOLERANCE)
@pytest.mark.parametrize("heads", PROMPT_HEADS, ids=str)
def test_prompt_chunks_of_every_length(
    heads: tuple[int, int, int], element_type: Any, compile_for_gpu: Compiler
) -> None:
    """From one token to a whole step, at the beginning of a prompt and at its end, beside rows that verify or none."""
    operation = operation_of(heads, element_type, PROMPT_SLOTS)
    run = runner(operation, compile_for_gpu)
    for num_slots, past_lengths in (
        (1, [0]),
        (5, [4000, 0]),
        (16, [0, 63]),
        (37, [255, 3000]),
        (512, [0]),
        (512, [4096]),
    ):
        chunks = Rows.alike(past_lengths, num_slots)
        for rows in (Rows([0], [0], 1), Rows([700, 0, 9], [3, 8, 1], 8)):
            assert_right(operation, run, random_call(operation.form, rows, chunks))


@pytest.mark.parametrize("element_type", TOLERANCE)
def test_the_last_position_stands_at_every_edge(element_type: Any, compile_for_gpu: Compiler) -> None:
    operation = operation_of((9, 3, 64), element_type)
    run = runner(operation, compile_for_gpu)
    assert_right(operation, run, random_call(operation.form, Rows.alike(LAST_POSITIONS, 1)))


def test_the_bits_of_a_row_do_not_depend_on_what_the_other_rows_hold(compile_for_gpu: Compiler) -> None:
    operation = operation_of((32, 8, 128), "bfloat16")
    run = runner(operation, compile_for_gpu)
    past = np.random.default_rng(3).integers(0, 2000, 16).tolist()
    tensors, _ = guarded_inputs(operation, random_call(operation.form, Rows.alike(past, 8)))
    together = {name: tensor.value for name, tensor in tensors.items()}
    found = run(together)["attended"]
    for row in range(len(past)):
        alone = {name: value.clone() for name, value in together.items()}
        alone["query_lengths"][:row] = alone["query_lengths"][row + 1 :] = 0
        part = slice(8 * row, 8 * row + 8)
        assert torch.equal(run(alone)["attended"][part].view(torch.int16), found[part].view(torch.int16))


def longest(operation: RowAttentionOperation, past: list[int], seed: int = 0) -> Arrays:
    """A call in a pool of the same size whatever the lengths."""
    call = random_call(operation.form, Rows.alike(past, 8), seed=seed)
    pages = np.full((600, *call["pages"].shape[1:]), np.nan, np.float32)
    pages[: len(call["pages"])] = call["pages"]
    return call | {"pages": pages}


def test_a_cuda_graph_follows_the_lengths_that_it_is_replayed_with(compile_for_gpu: Compiler) -> None:
    """Captured over short rows and replayed over long ones:
    nothing of a call is decided by what was live at capture."""
    operation = operation_of((32, 8, 128), "bfloat16")
    run = runner(operation, compile_for_gpu)
    tensors, _ = guarded_inputs(operation, longest(operation, [3, 0, 0, 9]))
    static = {name: tensor.value for name, tensor in tensors.items()}
    outputs = {name: tensor.clone() for name, tensor in run(static).items()}
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            run(static, outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for past_lengths in ([4590, 0, 255, 1000], [3, 0, 0, 9], [2, 4000, 300, 4600]):
        arrays = longest(operation, past_lengths, seed=past_lengths[0])
        fresh, _ = guarded_inputs(operation, arrays)
        for name, tensor in fresh.items():
            static[name].copy_(tensor.value)
        graph.replay()
        replayed = outputs["attended"].clone()
        again = run(static)["attended"]
        assert torch.equal(replayed.view(torch.int16), again.view(torch.int16))
        expected = row_attention(operation.form, **arrays)
        np.testing.assert_allclose(replayed.float().cpu().numpy(), expected, rtol=0, atol=TOLERANCE["bfloat16"])
