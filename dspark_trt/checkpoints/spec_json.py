"""Specifications as JSON, for the build directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dspark_trt.checkpoints.spec import (
    BlockDrafterSpec,
    DraftSource,
    Eagle3Spec,
    LanguageModelSpec,
    MedusaSpec,
    NgramSpec,
    TargetSpec,
)
from dspark_trt.errors import ManifestError, place

Spec = TypeVar("Spec")
_DRAFT_SOURCES: dict[str, type[DraftSource]] = {
    "ngram": NgramSpec,
    "lookahead": NgramSpec,
    "block": BlockDrafterSpec,
    "eagle3": Eagle3Spec,
    "language_model": LanguageModelSpec,
    "medusa": MedusaSpec,
}


def spec_to_json(spec: Any) -> dict[str, Any]:
    """A TargetSpec or a DraftSource as JSON-able values."""
    values: dict[str, Any] = TypeAdapter(type(spec)).dump_python(spec, mode="json")
    return values


def target_spec_from_json(values: Any) -> TargetSpec:
    """Raises ManifestError when `values` were not written by `spec_to_json`."""
    return _from_json(TargetSpec, values)


def drafter_spec_from_json(values: Any) -> DraftSource:
    """Raises ManifestError when `values` were not written by `spec_to_json`."""
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _DRAFT_SOURCES:
        raise ManifestError(
            f"drafter: kind: expected one of {', '.join(_DRAFT_SOURCES)}, found {kind!r}; run the build again"
        )
    return _from_json(_DRAFT_SOURCES[kind], values)


def read_draft_source(build: Path) -> DraftSource:
    """What drafts in the build directory `build`: its checkpoints/drafter.json. Raises ManifestError."""
    path = build / "checkpoints" / "drafter.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path} cannot be read ({error}); run `dspark-trt build` again") from None
    return drafter_spec_from_json(values)


def _from_json(kind: type[Spec], values: Any) -> Spec:
    try:
        spec = TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = place(first["loc"])
        raise ManifestError(f"{kind.__name__}: {key}: {first['msg']}; run the build again") from None
    if spec_to_json(spec) != values:  # pydantic ignores unknown keys of a dataclass and fills absent ones
        raise ManifestError(f"{kind.__name__}: the keys are not those of this version; run the build again")
    return spec
