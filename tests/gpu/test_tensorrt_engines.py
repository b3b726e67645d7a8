"""Engines that TensorRT compiled here, on this GPU: numbers, caches in place, the mask, CUDA graphs, and decoding.

They are compared with the PyTorch sessions in the same precision. `tensorrt` is tested where it is installed,
`tensorrt_rtx` otherwise.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.forms import select_form
from dspark_trt.contract.select_bindings import select_outputs
from dspark_trt.engines.device.engines import DeviceEngines
from dspark_trt.engines.device.graphs import CudaGraphCapture
from dspark_trt.engines.settings import EngineSettings
from dspark_trt.engines.tensorrt.compiler.network import parse_graph
from dspark_trt.engines.tensorrt.engines import open_tensorrt_engines
from dspark_trt.engines.tensorrt.library import SUPPORTED_SMS, Library
from dspark_trt.reference.on_device import open_reference_sessions
from tests.gpu.compiled_pair import (
    CHUNKS,
    CONTEXT,
    DEVICE,
    IDLE,
    POISONS,
    ROWS,
    Compiled,
    assert_near,
    assert_same_caches,
    compile_pair,
    drafting,
    ingestion,
    num_tokens,
    prefill,
    verification,
)
from tests.support.device_cases import (
    LIMITS,
    check_same_up_to_ties,
    device_loop,
    greedy_requests,
    oracle_tokens,
    schedulers,
    tokens_of,
)
from tests.support.prefix_select_cases import random_step
from tests.support.session_calls import copied
from tests.support.wide_products import NUM_TERMS, assert_summed_in_float32, wide_product

pytestmark = pytest.mark.gpu
LIBRARY: Library = "tensorrt" if find_spec("tensorrt") else "tensorrt_rtx"
SM = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
if SM not in SUPPORTED_SMS[LIBRARY]:
    pytest.skip(f"{LIBRARY} makes no code for SM {SM}", allow_module_level=True)

LARGEST_TIE = 0.3  # of bfloat16 logits whose standard deviation is 3


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compile_pair(tmp_path_factory.mktemp("build"), LIBRARY, SM)


@pytest.mark.parametrize("make", [verification, prefill])
def test_the_target_gives_what_pytorch_gives(make: Any, compiled: Compiled) -> None:
    found, expected = make(compiled), make(compiled)
    compiled.sessions[bindings.TARGET_GRAPH].run(found)
    compiled.reference.sessions.target.run(expected)
    chunks = IDLE if make is verification else CHUNKS
    num_real = num_tokens((*ROWS, *chunks))
    for name in (bindings.LOGITS, bindings.TAPS):
        assert_near(found[name][:num_real], expected[name][:num_real], name)
    assert_same_caches(found, expected, bindings.DECODE, ROWS)
    assert_same_caches(found, expected, bindings.PREFILL, chunks)


def test_every_row_sees_its_own_positions_and_no_others(compiled: Compiled) -> None:
    """Rows of different lengths, with poison behind each one's end: not a bit of any output changes."""
    for make, graph, names in (
        (verification, bindings.TARGET_GRAPH, (bindings.LOGITS, bindings.TAPS)),
        (prefill, bindings.TARGET_GRAPH, (bindings.LOGITS, bindings.TAPS)),
        (drafting, bindings.DRAFT_GRAPH, (bindings.DRAFT_IDS, bindings.DRAFT_LOGITS, bindings.CONFIDENCE_LOGITS)),
    ):
        calls = [make(compiled, poison) for poison in POISONS]
        for call in calls:
            compiled.sessions[graph].run(call)
        rows = {verification: ROWS, prefill: (*ROWS, *CHUNKS)}.get(make)
        num_real = 3 if rows is None else num_tokens(rows)
        for name in names:
            assert torch.equal(calls[0][name][:num_real], calls[1][name][:num_real]), name


def test_a_row_whose_end_moves_sees_one_position_more(compiled: Compiled) -> None:
    """Against a mask that is too narrow or ignored: the last visible position matters, the next one does not."""
    first, longer, beyond = (verification(compiled, POISONS[0]) for _ in range(3))
    past = ROWS[1][0]
    for layer in range(3):
        name = bindings.value_cache(bindings.DECODE, layer)
        longer[name][1, :, past - 1] += 4.0
        beyond[name][1, :, past + ROWS[1][1] + 3] += 4.0  # behind the last query, padding included
    for call in (first, longer, beyond):
        compiled.sessions[bindings.TARGET_GRAPH].run(call)
    row = slice(0, ROWS[1][1])
    assert not torch.equal(first[bindings.LOGITS][row], longer[bindings.LOGITS][row])
    others = slice(ROWS[1][1], num_tokens(ROWS))
    assert torch.equal(first[bindings.LOGITS][others], longer[bindings.LOGITS][others])
    assert torch.equal(first[bindings.LOGITS][: others.stop], beyond[bindings.LOGITS][: others.stop])


def test_the_drafter_gives_what_pytorch_gives(compiled: Compiled) -> None:
    found, expected = ingestion(compiled), ingestion(compiled)
    compiled.sessions[bindings.INGEST_GRAPH].run(found)
    compiled.reference.sessions.ingest.run(expected)
    assert_same_caches(found, expected, bindings.CONTEXT, CONTEXT)
    found, expected = drafting(compiled), drafting(compiled)
    compiled.sessions[bindings.DRAFT_GRAPH].run(found)
    compiled.reference.sessions.draft.run(expected)
    for name in (bindings.DRAFT_LOGITS, bindings.CONFIDENCE_LOGITS):  # behind the first slot drafts part ways
        assert_near(found[name][:, 0], expected[name][:, 0], name)
    ids = found[bindings.DRAFT_IDS]
    assert ((ids >= 0) & (ids < compiled.reference.drafter_dims.vocab_size)).all()
    assert ids[0].tolist() == found[bindings.DRAFT_LOGITS][0].argmax(dim=-1).tolist(), "temperature 0"


def test_the_selection_equals_its_definition(compiled: Compiled) -> None:
    dims = compiled.reference.drafter_dims
    form = select_form(dims)
    on_cpu = open_reference_sessions(
        compiled.pair.target, compiled.pair.drafter, limits=LIMITS, precision="bf16", device="cpu"
    )
    num_compared = 0
    for seed in range(20):
        arrays = random_step(form, 3, seed)
        extents = {"R": 3, "T": len(arrays["token_index"]), "B": len(arrays["row_requests"])}
        if extents["B"] > LIMITS.max_requests:
            continue
        inputs = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        outputs = {
            binding.name: torch.full([extents.get(str(size), size) for size in binding.shape], -1)
            for binding in select_outputs(dims)
        }
        moved = copied(inputs | outputs, device=DEVICE)
        on_cpu.sessions.select.run(inputs | outputs)
        compiled.sessions[bindings.SELECT_GRAPH].run(moved)
        for name, wanted in outputs.items():
            assert moved[name].tolist() == wanted.tolist(), f"{name}, seed {seed}"
        num_compared += 1
    assert num_compared > 3


@pytest.mark.parametrize(("make", "graph"), [(verification, bindings.TARGET_GRAPH), (drafting, bindings.DRAFT_GRAPH)])
def test_a_cuda_graph_gives_the_bits_of_its_bound_call_whatever_runs_in_between(
    make: Any, graph: str, compiled: Compiled
) -> None:
    session = compiled.sessions[graph]
    static, others = make(compiled), make(compiled)
    call = session.bind(static)
    capture = CudaGraphCapture(compiled.runtime.device)
    capture.warm_up(call)
    names = [name for name in static if not name.startswith((bindings.DECODE, bindings.PREFILL, bindings.CONTEXT))]
    expected = {name: static[name].clone() for name in names}
    replay = capture.capture(call)
    session.run(others)  # other addresses, in the same memory
    for name in (bindings.LOGITS, bindings.DRAFT_LOGITS):
        if name in static:
            static[name].zero_()
    replay()
    for name in names:
        assert torch.equal(static[name].view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.fixture
def engines(compiled: Compiled) -> DeviceEngines:
    settings = EngineSettings(backend=LIBRARY, sms=(SM,))
    return open_tensorrt_engines(compiled.build, settings)


@pytest.mark.parametrize("mode", ["fixed 5", "early_stop", "lagged_budget"])
def test_greedy_output_with_drafts_differs_at_near_ties_only(
    mode: str, compiled: Compiled, engines: DeviceEngines
) -> None:
    """From the output without drafts, and that one from the float32 oracle's."""
    pair, requests = compiled.pair, greedy_requests()
    plain = tokens_of(device_loop(engines, schedulers(pair.gamma)["off"]), requests)
    check_same_up_to_ties(pair, plain, oracle_tokens(pair, requests), LARGEST_TIE)
    loop = device_loop(engines, schedulers(pair.gamma)[mode])
    check_same_up_to_ties(pair, tokens_of(loop, requests), plain, LARGEST_TIE)
    assert loop.totals.num_drafts_verified > loop.totals.num_drafts_accepted > 0
    assert loop.totals.num_rows_moved > 0


def test_products_of_float16_are_summed_in_float32(compiled: Compiled) -> None:
    """Of as many terms as the widest product of Qwen3-8B has."""
    trt, log = compiled.runtime.trt, compiled.runtime.log
    model, x, exact = wide_product()
    builder = trt.Builder(log.logger)
    network, _ = parse_graph(trt, builder, model, Path("product.onnx"), log)
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    profile.set_shape("x", (1, NUM_TERMS), x.shape, (64, NUM_TERMS))
    config.add_optimization_profile(profile)
    engine = trt.Runtime(log.logger).deserialize_cuda_engine(builder.build_serialized_network(network, config))
    context = engine.create_execution_context()
    given = torch.from_numpy(x).to(DEVICE)
    found = torch.empty(exact.shape, dtype=torch.float16, device=DEVICE)
    context.set_input_shape("x", x.shape)
    for name, tensor in (("x", given), ("y", found)):
        context.set_tensor_address(name, tensor.data_ptr())
    torch.cuda.synchronize()
    assert context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert_summed_in_float32(found.cpu().numpy(), exact)
