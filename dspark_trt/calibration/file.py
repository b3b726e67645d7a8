"""calibration/calibration.json of a build: the lines in force, and how well they did on held-out prompts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspark_trt.calibration.quality import Quality
from dspark_trt.contract.calibration import Calibration, SlotCalibration
from dspark_trt.contract.lookup import UNMEASURED_LOOKUP, LookupAcceptance
from dspark_trt.errors import ManifestError, RecipeError, place

CALIBRATION_FILE = "calibration.json"
Finite = Annotated[float, Field(allow_inf_nan=False)]
Slope = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Lines(BaseModel):
    """confidence of slot j = sigmoid(slopes[j] * logit + offsets[j])."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slopes: tuple[Slope, ...]
    offsets: tuple[Finite, ...]


class LookupCurves(BaseModel):
    """P(the next draft is accepted) behind a match of 1, 2, ... tokens of the request's own text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    greedy: tuple[Probability, ...]
    sampled: tuple[Probability, ...]


class CalibrationFile(BaseModel):
    """Everything about a calibration. `kind` neutral: nothing was fitted; lookup: there is no drafter, and only how
    often copied drafts are accepted was measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    kind: Literal["fitted", "neutral", "imported", "lookup"]
    greedy: Lines
    sampled: Lines
    survival: tuple[Probability, ...] = ()  # mean survival of each position
    blocks: tuple[tuple[Probability, ...], ...] = ()  # predicted survivals of typical blocks, the least promising first
    temperatures: tuple[Slope, ...]  # T_j of plain Sequential Temperature Scaling, for other engines
    lookup: LookupCurves | None = None  # None: not measured
    num_fit_blocks: int = 0
    before: tuple[dict[str, Any], ...] = ()  # Quality of each position on held-out prompts, without the lines
    after: tuple[dict[str, Any], ...] = ()  # and with them
    after_temperatures: tuple[dict[str, Any], ...] = ()  # and with `temperatures` alone, as other engines read them
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_gamma(self) -> CalibrationFile:
        lengths = {len(each) for each in (self.greedy.slopes, self.greedy.offsets, self.sampled.slopes)}
        lengths |= {len(self.sampled.offsets), len(self.temperatures), len(self.survival) or len(self.temperatures)}
        lengths |= {len(block) for block in self.blocks}
        if len(lengths) != 1:
            raise ValueError(f"expected one number a slot everywhere, found lengths {sorted(lengths)}")
        return self

    @property
    def calibration(self) -> Calibration:
        return Calibration(
            SlotCalibration(self.greedy.slopes, self.greedy.offsets),
            SlotCalibration(self.sampled.slopes, self.sampled.offsets),
            self.survival,
            self.blocks,
        )

    @property
    def lookup_acceptance(self) -> LookupAcceptance:
        """Raises RecipeError when a curve is not usable."""
        if self.lookup is None:
            return UNMEASURED_LOOKUP
        return LookupAcceptance(greedy=self.lookup.greedy, sampled=self.lookup.sampled)

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1) + "\n")


def neutral(
    gamma: int, provenance: dict[str, Any] | None = None, lookup: LookupAcceptance | None = None
) -> CalibrationFile:
    """Confidences as the drafter gives them."""
    lines = Lines(slopes=(1.0,) * gamma, offsets=(0.0,) * gamma)
    temperatures = (1.0,) * gamma
    return CalibrationFile(
        kind="neutral",
        greedy=lines,
        sampled=lines,
        temperatures=temperatures,
        lookup=_curves(lookup),
        provenance=provenance or {},
    )


def of_lookups(gamma: int, lookup: LookupAcceptance, provenance: dict[str, Any]) -> CalibrationFile:
    """Of a build without a drafter, whose confidences are the curves'."""
    return neutral(gamma, provenance, lookup).model_copy(update={"kind": "lookup"})


def fitted(
    calibration: Calibration,
    temperatures: list[float],
    *,
    num_fit_blocks: int,
    before: list[Quality],
    after: list[Quality],
    after_temperatures: list[Quality],
    provenance: dict[str, Any],
    lookup: LookupAcceptance | None = None,
) -> CalibrationFile:
    """What a fit has found."""
    return CalibrationFile(
        kind="fitted",
        greedy=Lines(slopes=calibration.greedy.slopes, offsets=calibration.greedy.offsets),
        sampled=Lines(slopes=calibration.sampled.slopes, offsets=calibration.sampled.offsets),
        survival=calibration.survival,
        blocks=calibration.blocks,
        temperatures=tuple(temperatures),
        lookup=_curves(lookup),
        num_fit_blocks=num_fit_blocks,
        before=tuple(asdict(each) for each in before),
        after=tuple(asdict(each) for each in after),
        after_temperatures=tuple(asdict(each) for each in after_temperatures),
        provenance=provenance,
    )


def _curves(lookup: LookupAcceptance | None) -> LookupCurves | None:
    return None if lookup is None else LookupCurves(greedy=lookup.greedy, sampled=lookup.sampled)


def load_calibration(path: Path, *, gamma: int | None = None) -> CalibrationFile:
    """Raises ManifestError when the file is missing, holds no calibration, or one of another gamma."""
    try:
        loaded = CalibrationFile.model_validate_json(path.read_bytes())
        _ = loaded.lookup_acceptance
    except FileNotFoundError:
        raise ManifestError(f"no calibration at {path}; run `dspark-trt build` again") from None
    except (OSError, ValidationError, RecipeError) as error:
        where = error
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            where = f"{place(first['loc']) or 'file'}: {first['msg']}"  # type: ignore[assignment]
        raise ManifestError(f"{path} is no calibration ({where}); run `dspark-trt calibrate` again") from None
    if gamma is not None and loaded.calibration.gamma != gamma:
        raise ManifestError(
            f"{path}: expected {gamma} slots, found {loaded.calibration.gamma}: it belongs to another drafter"
        )
    return loaded
