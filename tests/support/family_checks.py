"""What a draft engine of a device has to do, whatever its family and its precision: checks against an oracle, and loops
without one."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark_trt.contract.protocol import DraftEngine
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.engines.device.engines import DeviceEngines
from tests.support.device_cases import device_loop, greedy_requests, to_numpy, tokens_of


def check_first_drafts(engines: DeviceEngines, oracle: DraftEngine, contexts: Any, largest_error: float) -> None:
    """Logits of the first slot, over the ids that the oracle can propose: later slots follow drafts, which rounding may
    change. `contexts` of both engines; the error is relative, root mean square."""
    rows = [2, 0, 1]
    for lengths in ([7, 3, 20], [1, 2, 3]):
        contexts.ingest(rows, lengths)
        block = contexts.block(rows)
        found, expected = engines.drafter.draft(block), oracle.draft(block)
        logits, wanted = to_numpy(found.draft_logits)[:, 0], to_numpy(expected.draft_logits)[:, 0]
        if oracle.draft_vocab is not None:
            logits = logits[:, oracle.draft_vocab]
        error = np.sqrt(np.square(logits - wanted).mean() / np.square(wanted).mean())
        assert error < largest_error, error


def check_a_model_that_drafts_for_itself(engines: DeviceEngines, least_accepted: float) -> None:
    """Through prompts in chunks, moved rows and fused steps: a wrong position of the context would show."""
    for mode in ("fixed", "lagged_budget"):
        loop = device_loop(engines, SchedulerConfig(mode))  # type: ignore[arg-type]
        tokens_of(loop, greedy_requests())
        totals = loop.totals
        assert totals.num_drafts_accepted >= least_accepted * totals.num_drafts_verified > 20 * least_accepted
