"""Nothing in a session depends on the values of a tensor or waits for them, which a CUDA graph could not hold.

Sessions run on fake tensors, which have shapes and no values: whatever asks for a value raises. What runs on a GPU
only, the plugins' kernels, is captured in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_trt.contract import bindings
from tests.engine.test_torch_sessions import DRAFT, Pair, ingest_tensors, target_tensors, write_pair
from tests.support.session_calls import Tensors, copied, draft_call

ELEMENT_TYPES = ("float32", "bfloat16", "float16")
# a value on the host, a shape made of values, a tensor made of values on the host
FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "lift_fresh", "is_nonzero")


class Recorder(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"), head={"head_type": "rnn"})


def target_call_of(pair: Pair) -> tuple[Callable[[Tensors], None], Tensors]:
    return pair.target_session().forward, target_tensors(pair.target_dims())


def ingest_call_of(pair: Pair) -> tuple[Callable[[Tensors], None], Tensors]:
    return pair.ingest_session().forward, ingest_tensors(pair.drafter_dims())


def draft_call_of(pair: Pair) -> tuple[Callable[[Tensors], None], Tensors]:
    return pair.draft_session().forward, draft_call(pair.drafter_dims(), **DRAFT)


@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
@pytest.mark.parametrize("call_of", [target_call_of, ingest_call_of, draft_call_of])
def test_a_call_needs_no_value_of_any_tensor(call_of: Any, element_type: str, pair: Pair) -> None:
    forward, tensors = call_of(pair._replace(element_type=element_type))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        converted: dict[int, Any] = {}
        for tensor in tensors.values():
            converted.setdefault(id(tensor), mode.from_tensor(tensor))
        forward({name: converted[id(tensor)] for name, tensor in tensors.items()})
    with Recorder() as recorder, torch.no_grad():
        forward(copied(tensors))
    assert recorder.names, "something ran"
    assert not recorder.names.intersection(FORBIDDEN)


@pytest.mark.parametrize(
    ("asks", "error"),
    [
        (lambda past: past.max().item(), DataDependentOutputException),
        (lambda past: past[past > 3], DynamicOutputShapeException),
        (lambda past: past + 1 if past.any() else past, DataDependentOutputException),
    ],
)
def test_what_asks_for_a_value_is_caught(asks: Callable[[torch.Tensor], Any], error: type[Exception]) -> None:
    with FakeTensorMode(), pytest.raises(error):
        asks(torch.arange(4))


def test_outputs_and_caches_stay_where_they_are(pair: Pair) -> None:
    """A captured graph writes to addresses."""
    for call_of in (target_call_of, ingest_call_of, draft_call_of):
        forward, tensors = call_of(pair)
        before = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in tensors.items()}
        with torch.no_grad():
            forward(tensors)
        assert {name: (tensor.data_ptr(), tensor.shape) for name, tensor in tensors.items()} == before
    assert bindings.DRAFT_IDS in before
