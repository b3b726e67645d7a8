"""Decoding loops over a build's engines before its step table and calibration are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark_trt.contract.acceptance import AcceptEngine
from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.lookup import UNMEASURED_LOOKUP
from dspark_trt.contract.protocol import DraftEngine, TargetEngine
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.loop import DecodingLoop, OnVerified


@dataclass(frozen=True, slots=True)
class UnpricedLoops:
    """Makes loops in modes that price no steps, with confidences as the drafter gives them; without a drafter they
    decode plainly."""

    target: TargetEngine
    drafter: DraftEngine | None
    decode: Callable[[Sequence[int]], str]
    eos_token_ids: Sequence[int] = ()
    acceptance: AcceptEngine | None = None
    num_trajectory_drafts: int = 0  # of drafter lookahead, which needs a loop to be seen

    def __call__(self, scheduler: SchedulerConfig, on_verified: OnVerified | None = None) -> DecodingLoop:
        gamma = self.num_trajectory_drafts if self.drafter is None else self.drafter.gamma
        return DecodingLoop(
            target=self.target,
            drafter=self.drafter,
            acceptance=self.acceptance,
            step_table=None,
            calibration=Calibration.from_temperatures([1.0] * gamma),
            lookup=UNMEASURED_LOOKUP if self.num_trajectory_drafts else None,
            keeps_trajectories=self.num_trajectory_drafts > 0,
            eos_token_ids=self.eos_token_ids,
            decode=self.decode,
            scheduler=scheduler,
            on_verified=on_verified,
        )
