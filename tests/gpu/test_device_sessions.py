"""The PyTorch sessions on a GPU, with the plugins' compiled kernels, against the same sessions on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.contract import bindings
from dspark_trt.contract.forms import select_form
from dspark_trt.contract.select_bindings import select_outputs
from dspark_trt.engines.device.graphs import CudaGraphCapture
from dspark_trt.engines.device.session import DeviceSession
from dspark_trt.reference.on_device import DevicePrecision, ReferenceSessions, open_reference_sessions
from tests.support.device_cases import HEADS, LIMITS, Pair, make_pair
from tests.support.prefix_select_cases import random_step
from tests.support.session_calls import Poison, Tensors, caches_of, copied, draft_call, ingest_call, target_call

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TOLERANCE = 2e-4  # of float32 logits whose standard deviation is 3
RELATIVE_ERROR = {"bf16": 0.05, "fp16": 0.006}  # root mean square, with 8 and 11 bits of mantissa
POISONS = (Poison(0.0, 0, 0), Poison(3e3, 7, 4))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def sessions_on(device: str, pair: Pair, precision: DevicePrecision = "fp32") -> ReferenceSessions:
    return open_reference_sessions(pair.target, pair.drafter, limits=LIMITS, precision=precision, device=device)


def calls(opened: ReferenceSessions, poison: Any = POISONS[1]) -> dict[str, tuple[DeviceSession, Tensors]]:
    """A call of each graph with weights, by name."""
    target = target_call(
        opened.target_dims,
        ((0, 0), (17, 3), (90, 1), (4, 6)),
        ((0, 9), (12, 2)),
        num_tokens=32,
        num_queries=(6, 10),
        poison=poison,
    )
    context = ingest_call(
        opened.drafter_dims, ((5, 4), (0, 0), (0, 7), (40, 8)), num_tokens=32, num_queries=8, poison=poison
    )
    draft = draft_call(opened.drafter_dims, (9, 43, 1), (3, 0, 2), (0.0, 0.8, 1.3), num_rows=4, poison=poison)
    sessions = opened.sessions
    return {
        "target": (sessions.target, target),
        "ingest": (sessions.ingest, context),
        "draft": (sessions.draft, draft),
    }


def outputs_of(tensors: Tensors) -> Tensors:
    names = (bindings.LOGITS, bindings.DRAFT_IDS, bindings.DRAFT_LOGITS, bindings.CONFIDENCE_LOGITS)
    return caches_of(tensors) | {name: tensors[name] for name in names if name in tensors}


@pytest.mark.parametrize("head", HEADS)
def test_sessions_on_the_gpu_give_what_they_give_on_the_cpu(head: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, drafter=HEADS[head])
    on_cpu, on_gpu = calls(sessions_on("cpu", pair)), calls(sessions_on(DEVICE, pair))
    for name, (session, tensors) in on_cpu.items():
        moved = copied(tensors, device=DEVICE)
        session.run(tensors)
        on_gpu[name][0].run(moved)
        for output, wanted in outputs_of(tensors).items():
            found = moved[output].cpu()
            if wanted.dtype == torch.int64:
                assert found.tolist() == wanted.tolist(), output
            else:
                np.testing.assert_allclose(found, wanted, atol=TOLERANCE, err_msg=f"{name}: {output}")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_sessions_are_close_to_float32(precision: DevicePrecision, pair: Pair) -> None:
    wide, narrow = sessions_on("cpu", pair), sessions_on(DEVICE, pair, precision)
    dtype = getattr(torch, narrow.target_dims.element_type)
    with_16_bits = calls(narrow, POISONS[0])
    for name, (session, tensors) in calls(wide, POISONS[0]).items():
        moved = copied(tensors, device=DEVICE, element_type=dtype)
        session.run(tensors)
        with_16_bits[name][0].run(moved)
        for output, wanted in outputs_of(tensors).items():
            if wanted.dtype == torch.int64 or (name == "draft" and output in caches_of(tensors)):
                continue
            found, exact = moved[output].cpu().float(), wanted.float()
            if name == "draft":  # behind the first slot drafts part ways
                found, exact = found[:, 0], exact[:, 0]
            error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
            assert error < RELATIVE_ERROR[precision], f"{name}: {output}"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_cuda_graph_gives_the_bits_of_the_call_it_was_captured_from(precision: DevicePrecision, pair: Pair) -> None:
    for name, (session, tensors) in calls(sessions_on(DEVICE, pair, precision)).items():
        static = copied(tensors, device=DEVICE)
        call = session.bind(static)
        capture = CudaGraphCapture(torch.device(DEVICE, torch.cuda.current_device()))
        capture.warm_up(call)
        replay = capture.capture(call)
        for seed in range(2):
            fresh = copied(tensors, device=DEVICE)
            for index in (bindings.TOKEN_IDS, bindings.ANCHOR_IDS, bindings.TAPS):
                if index in fresh and not (index == bindings.TAPS and name == "target"):
                    fresh[index].copy_(fresh[index].flip(0) if seed else fresh[index])
            for each, tensor in fresh.items():
                static[each].copy_(tensor)
            replay()
            session.run(fresh)
            for output, eager in outputs_of(fresh).items():
                bits = [each.contiguous().view(torch.uint8) for each in (static[output], eager)]
                assert torch.equal(*bits), f"{name}: {output}"


def test_selection_on_the_gpu_equals_its_definition(pair: Pair) -> None:
    on_cpu, on_gpu = sessions_on("cpu", pair), sessions_on(DEVICE, pair)
    form = select_form(on_cpu.drafter_dims)
    for seed in range(10):
        inputs = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in random_step(form, 7, seed).items()}
        extents = {"R": 7, "T": len(inputs["token_index"]), "B": len(inputs["row_requests"])}
        outputs = {
            binding.name: torch.full([extents.get(str(size), size) for size in binding.shape], -1)
            for binding in select_outputs(on_cpu.drafter_dims)
        }
        moved = copied(inputs | outputs, device=DEVICE)
        on_cpu.sessions.select.run(inputs | outputs)
        on_gpu.sessions.select.run(moved)
        for name, wanted in outputs.items():
            assert moved[name].tolist() == wanted.tolist(), f"{name}, seed {seed}"
