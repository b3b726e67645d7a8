"""How engines are called: every call is timed, and fails for its requests alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from dspark_trt.runtime.metrics import StepRecord
from dspark_trt.runtime.state import RequestState

logger = logging.getLogger(__name__)

Part = Literal["ingest_ms", "draft_ms", "verify_ms", "copy_ms"]


class EngineCallFailed(Exception):
    """An engine call raised. The K/V of its requests are undefined: the requests cannot go on."""

    def __init__(self, states: Sequence[RequestState]) -> None:
        super().__init__(f"an engine call failed for {len(states)} requests")
        self.states = states


@contextmanager
def timed_call(record: StepRecord, part: Part, states: Sequence[RequestState]) -> Iterator[None]:
    """Adds the time of what is called inside to a part of the step.

    Raises EngineCallFailed where it raises: the K/V of `states` are then undefined.
    """
    started = time.perf_counter()
    try:
        yield
    except Exception as error:  # whatever a backend raises: it is logged in full, the client hears none of it
        logger.exception("an engine call failed; its %d requests end with an error", len(states))
        raise EngineCallFailed(states) from error
    finally:
        elapsed_ms = (time.perf_counter() - started) * 1e3
        setattr(record, part, getattr(record, part) + elapsed_ms)
