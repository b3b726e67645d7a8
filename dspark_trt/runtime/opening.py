"""What decides in a loop, made from the parts that the loop is given."""

from __future__ import annotations

from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.lookup import LookupAcceptance
from dspark_trt.contract.protocol import DraftEngine
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import RecipeError
from dspark_trt.runtime.scheduling import Scheduling
from dspark_trt.steptable.table import StepTable


def open_scheduling(
    config: SchedulerConfig,
    *,
    drafter: DraftEngine | None,
    lookup: LookupAcceptance | None,
    calibration: Calibration,
    table: StepTable | None,
    num_rows: int,
    selects_on_device: bool,
) -> Scheduling | None:
    """None where no draft is ever verified: neither a drafter nor lookups, or a mode that verifies none.

    Raises RecipeError when drafter, calibration, table and mode do not fit each other.
    """
    gamma = drafter.gamma if drafter is not None else calibration.gamma if lookup is not None else 0
    if gamma and calibration.gamma != gamma:
        raise RecipeError(f"calibration: expected {gamma} slots, found {calibration.gamma}")
    if config.max_verify_len(gamma) == 0:
        return None
    return Scheduling(
        config,
        calibration=calibration,
        table=table,
        num_rows=num_rows,
        selects_on_device=selects_on_device,
        lookup=lookup,
        has_drafter=drafter is not None,
    )
