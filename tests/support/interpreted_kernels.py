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


def run_interpreted(operation: Operation, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """Outputs by name. Float inputs are rounded to the operation's element types.

    Raises AssertionError when anything outside of an output or of the workspace was written.
    """
    return _worker().submit(_run, operation, {t.name: inputs[t.name] for t in operation.inputs}).result()


@functools.cache
def _worker() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _run(operation: Operation, inputs: Arrays) -> Arrays:
    from tests.support.interpreter_worker import run

    return run(operation, inputs)
