"""What a step will cost: the step table's prices, corrected by what serving has measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.corrections import TimeCorrection
from dspark_trt.steptable.table import StepTable

Floats = NDArray[np.float64]


class StepPrices:
    """Milliseconds of a step and its parts, each with its correction."""

    def __init__(self, table: StepTable, correction: TimeCorrection) -> None:
        self.table = table
        self._correction = correction

    def verify(self, num_requests: int, context_tokens: float, first: int, last: int) -> Floats:
        """The target's call with first .. last tokens more than one a request, [last - first + 1]."""
        curve = self.table.step_curve(num_requests, context_tokens, first, last)
        return curve * self._correction.factor("verify", num_requests)

    def plain(self, num_requests: int, context_tokens: float, first: int, last: int) -> Floats:
        """A whole step that does not draft, with first .. last extra tokens, [last - first + 1]."""
        return self.verify(num_requests, context_tokens, first, last) + self.host(num_requests)

    def with_drafts(self, num_requests: int, context_tokens: float, first: int, max_drafts: int) -> Floats:
        """A whole step that does not draft, with `first` extra tokens and 0 .. max_drafts drafts, [1 + max_drafts].

        Steps that verify drafts have a correction of their own: what the first draft adds is the smallest difference in
        the table and decides most.
        """
        curve = self.table.step_curve(num_requests, context_tokens, first, first + max_drafts)
        without = float(curve[0]) * self._correction.factor("verify", num_requests)
        curve = np.maximum(curve * self._correction.factor("verify_drafts", num_requests), without)
        curve[0] = without
        return curve + self.host(num_requests)

    def verify_drafts(self, num_requests: int, context_tokens: float, first: int, num_drafts: int) -> float:
        """The target's call with `first` extra tokens and so many drafts: one price of `with_drafts`."""
        curve = self.table.step_curve(num_requests, context_tokens, first, first + num_drafts)
        without = float(curve[0]) * self._correction.factor("verify", num_requests)
        if not num_drafts:
            return without
        return max(float(curve[-1]) * self._correction.factor("verify_drafts", num_requests), without)

    def host(self, num_requests: int) -> float:
        """A step outside the engines."""
        return self.table.host_cost(num_requests, is_drafting=False) * self._correction.factor("host", num_requests)

    def draft(self, num_requests: int, num_slots: int, context_tokens: float, num_ingested: int) -> float:
        """The drafter's calls: a block of num_slots for each request, and the context that is brought up before it."""
        if not num_requests:
            return 0.0
        cost = self.table.draft_cost(num_requests, num_slots, context_tokens) + self.table.ingest_cost(num_ingested)
        return cost * self._correction.factor("draft", num_requests)

    def lookup_host(self, num_requests: int) -> float:
        """What a step that copies drafts, and drafts none, takes outside the engines beyond a plain one. The table does
        not know it: it begins as that of a step that drafts."""
        return self._more_host(num_requests) * self._correction.factor("lookup_host", num_requests)

    def drafting_host(self, num_requests: int) -> float:
        """What a step that drafts for so many requests takes outside the engines, beyond a plain one."""
        if not num_requests:
            return 0.0
        return self._more_host(num_requests) * self._correction.factor("drafting_host", num_requests)

    def _more_host(self, num_requests: int) -> float:
        whole = self.table.host_cost(num_requests, is_drafting=True)
        return whole - self.table.host_cost(num_requests, is_drafting=False)
