"""Torch CUDA tensors for operations, with poisoned surroundings;
and checks that do not depend on the last bit of a logit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from dspark_trt_plugins.launch import TorchOperation
from dspark_trt_plugins.markov_head import reference
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.operation import Operation, Tensor, extents_of
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
GUARD_BYTES = 4096
POISON_BYTE = 0xFF  # a NaN in every float type, -1 as an integer


class GuardedTensor:
    """A CUDA tensor inside a larger allocation of POISON_BYTE; an output is full of it too."""

    def __init__(self, tensor: Tensor, extents: Mapping[str, int], value: NDArray[Any] | None = None) -> None:
        num_bytes = tensor.num_bytes(extents)
        self._memory = torch.full((num_bytes + 2 * GUARD_BYTES,), POISON_BYTE, dtype=torch.uint8, device="cuda")
        inside = self._memory[GUARD_BYTES : GUARD_BYTES + num_bytes]
        self.value = inside.view(getattr(torch, tensor.element_type)).view(tensor.shape_in(extents))
        self.name = tensor.name
        if value is not None:
            self.value.copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def assert_surroundings_untouched(self) -> None:
        for part in (self._memory[:GUARD_BYTES], self._memory[-GUARD_BYTES:]):
            assert bool((part == POISON_BYTE).all()), f"{self.name}: written outside"


def guarded_inputs(operation: Operation, arrays: Arrays) -> tuple[dict[str, GuardedTensor], dict[str, int]]:
    extents = extents_of(operation.inputs, [arrays[tensor.name].shape for tensor in operation.inputs])
    return {t.name: GuardedTensor(t, extents, arrays[t.name]) for t in operation.inputs}, extents


def run_guarded(operation: Operation, runner: TorchOperation, arrays: Arrays) -> Arrays:
    """Outputs by name, bfloat16 as float32; fails when anything outside of an output changed."""
    inputs, extents = guarded_inputs(operation, arrays)
    outputs = {t.name: GuardedTensor(t, extents) for t in operation.outputs}
    before = {name: tensor.value.clone() for name, tensor in inputs.items()}
    runner({n: t.value for n, t in inputs.items()}, {n: t.value for n, t in outputs.items()})
    torch.cuda.synchronize()
    for tensor in (*inputs.values(), *outputs.values()):
        tensor.assert_surroundings_untouched()
    for name, value in before.items():
        assert torch.equal(value.view(torch.uint8), inputs[name].value.view(torch.uint8)), f"{name}: an input changed"
    values = {name: tensor.value.cpu() for name, tensor in outputs.items()}
    return {name: (v.float() if v.dtype is torch.bfloat16 else v).numpy() for name, v in values.items()}


def rounded(operation: Operation, arrays: Arrays) -> Arrays:
    """Float values as the operation's element types hold them."""
    types = {tensor.name: getattr(torch, tensor.element_type) for tensor in operation.inputs}
    return {
        name: torch.from_numpy(value).to(types[name]).double().numpy() if value.dtype.kind == "f" else value
        for name, value in arrays.items()
    }


def assert_drafts_are_right(
    form: MarkovHeadForm,
    weights: Arrays,
    inputs: Arrays,
    found: Arrays,
    monkeypatch: pytest.MonkeyPatch,
    tolerance: float,
) -> None:
    """Logits and confidences equal the reference's after the same drafts,
    and every draft is one that its uniform allows.

    Drafts themselves are not compared: where two candidates are closer than float rounding either is right.
    """
    columns = iter(found["draft_ids"].T)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "draw", lambda *_: next(columns))
        expected = reference.markov_head(form, weights, **inputs)  # type: ignore[arg-type]
    np.testing.assert_allclose(found["draft_logits"], expected.draft_logits, atol=tolerance, rtol=1e-5)
    if form.has_confidence_head:
        np.testing.assert_allclose(found["confidence_logits"], expected.confidence_logits, atol=tolerance)
    assert ((found["draft_ids"] >= 0) & (found["draft_ids"] < form.vocab_size)).all()
    for request, slot in np.ndindex(found["draft_ids"].shape):
        logits = found["draft_logits"][request, slot].astype(np.float64)
        token, temperature = found["draft_ids"][request, slot], inputs["temperatures"][request]
        if temperature == 0:
            assert token == logits.argmax()
            continue
        mass = np.exp((logits - logits.max()) / temperature)
        cumulative = np.append(0, mass.cumsum()) / mass.sum()
        uniform = inputs["uniforms"][request, slot]
        assert cumulative[token] - 1e-5 <= uniform <= cumulative[token + 1] + 1e-5
        assert mass[token] > 0
