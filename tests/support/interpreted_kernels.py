"""Kernels under Triton's CPU interpreter, in a process of their own:
whether Triton interprets is decided when it is imported."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from dspark_trt_plugins.operation import Operation
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


def run_interpreted(
    operation: Operation, inputs: Mapping[str, NDArray[Any]], *, with_workspace: bool = False
) -> Arrays:
    """Outputs by name, and where it is asked for what is left in the workspace, which holds NaN at first.

    Float inputs are rounded to the operation's element types.

    Raises AssertionError when anything outside of an output or of the workspace was written.
    """
    given = {tensor.name: inputs[tensor.name] for tensor in operation.inputs}
    found = _worker().submit(_run, operation, given).result()
    kept = {tensor.name for tensor in operation.outputs} | (set(found) if with_workspace else set())
    return {name: value for name, value in found.items() if name in kept}


@functools.cache
def _worker() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _run(operation: Operation, inputs: Arrays) -> Arrays:
    from tests.support.interpreter_worker import run

    return run(operation, inputs)
