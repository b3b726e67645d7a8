"""Prefix schedulers without a loop around them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_trt.contract.calibration import Calibration, blocks_around
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.corrections import AcceptanceCorrection
from dspark_trt.runtime.prefix_scheduler import Offer, PrefixScheduler, survival_of
from dspark_trt.runtime.survival_history import SurvivalHistory


class LogitScheduler:
    """A prefix scheduler that is handed raw confidence logits."""

    def __init__(self, config: SchedulerConfig, temperatures: Sequence[float], num_rows: int) -> None:
        self.calibration = Calibration.from_temperatures(temperatures)
        expected = np.ones(len(temperatures))
        self.history = SurvivalHistory(num_rows=num_rows, gamma=len(temperatures), prior=blocks_around(expected))
        self.prefixes = PrefixScheduler(
            config,
            calibration=self.calibration,
            history=self.history,
            acceptance=AcceptanceCorrection(len(temperatures)),
            expected_survival=expected,
        )

    def choose(self, logits: np.ndarray, offer: Offer, num_planned: int = 0) -> np.ndarray:
        """One step."""
        self.prefixes.advance()
        confidence = self.calibration.confidence(logits, offer.is_greedy)
        verify_lens = self.prefixes.choose(confidence, offer, num_planned)
        self.prefixes.record(survival_of(confidence), offer)
        return verify_lens
