"""A calibration that somebody else made: a file of ours, or the temperatures that another engine reads.

What is read (shapes of October 2026; other keys are not looked at):

| form | where the temperatures stand |
|---|---|
| `calibration.json` of a build | the whole file |
| TensorRT-LLM | `sts_temperatures`, else `temperatures` |
| SGLang | `temperatures` |
| vllm-ascend | `confidence_temperatures`, at the top (a drafter's config.json) or in `profile` or `hardware_profile` |

Each is a list of one number above 0 a slot: confidence of slot j = sigmoid(logit_j / T_j).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from dspark_trt.calibration.file import CalibrationFile, Lines
from dspark_trt.contract.calibration import Calibration
from dspark_trt.errors import RecipeError, abridged, place

_KEYS = ("sts_temperatures", "temperatures", "confidence_temperatures")
_FOLDERS = ("profile", "hardware_profile")  # of vllm-ascend
_Temperatures = TypeAdapter(list[Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]])


def read_given(path: Path, gamma: int, *, is_of_lookups: bool = False, said_in: str = "calibration") -> CalibrationFile:
    """is_of_lookups: drafts are copied from each request's own text, which no temperature describes.
    said_in: the recipe key or the option that gave the path.

    Raises RecipeError when the file cannot be read, holds none of the forms, or not one number for each slot."""
    where = f"{said_in}: {path}"
    data = _read(path, where)
    if "greedy" in data:
        found = _own(where, data)
    else:
        temperatures = _temperatures(where, data)
        lines = Calibration.from_temperatures(temperatures).greedy
        both = Lines(slopes=lines.slopes, offsets=lines.offsets)
        found = CalibrationFile(kind="imported", greedy=both, sampled=both, temperatures=tuple(temperatures))
    if len(found.temperatures) != gamma:
        raise RecipeError(
            f"{where}: expected {gamma} slots, found {len(found.temperatures)}: it belongs to another "
            "drafter; give the file of this one"
        )
    if is_of_lookups and found.lookup is None:
        raise RecipeError(
            f"{where}: expected how often copied drafts are accepted (`lookup`), found none; give the calibration.json "
            "of a build with the same drafter, or leave it out"
        )
    provenance = {"imported_from": path.name, "kind": found.kind, "provenance": found.provenance}
    return found.model_copy(update={"kind": "imported", "provenance": provenance})


def _read(path: Path, where: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecipeError(f"{where} cannot be read ({error.strerror}); give a readable file") from None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, thousands of brackets or digits
        raise RecipeError(f"{where} is not valid JSON ({error}); give a file of temperatures") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: expected a JSON object, found {type(data).__name__}")
    return data


def _own(where: str, data: dict[str, Any]) -> CalibrationFile:
    try:
        return CalibrationFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = place(first["loc"]) or "file"
        raise RecipeError(
            f"{where}: {key}: {first['msg'].removeprefix('Value error, ')}; give the calibration.json of "
            "a build as it was written"
        ) from None


def _temperatures(where: str, data: dict[str, Any]) -> list[float]:
    places = [data, *(data[name] for name in _FOLDERS if isinstance(data.get(name), dict))]
    for values in places:
        for key in _KEYS:
            if key in values:
                return _checked(where, key, values[key])
    raise RecipeError(
        f"{where}: expected a build's calibration.json or a list under one of {', '.join(_KEYS)}, found "
        f"keys {abridged(sorted(data)[:8])}"
    )


def _checked(where: str, key: str, value: Any) -> list[float]:
    try:
        return _Temperatures.validate_python(value)
    except ValidationError:
        raise RecipeError(
            f"{where}: {key}: expected one finite number above 0 for each slot, found {abridged(value)}"
        ) from None
