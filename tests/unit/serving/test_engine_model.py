"""What the engine model hands on of the limits that it is served with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dspark_trt.errors import RecipeError
from dspark_trt.runtime.loop import DEFAULT_MAX_STRETCH
from dspark_trt.serving import engine_model
from dspark_trt.serving.engine_model import EngineModel
from dspark_trt.serving.limits import AdmissionLimits


class MadeLoopError(Exception):
    """With what a loop was asked for with."""


def test_how_far_prompts_may_stretch_a_step_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_loop(scheduler: Any, **options: Any) -> Any:
        raise MadeLoopError(options)

    limits = SimpleNamespace(max_requests=4, max_seq_len=64)
    table = SimpleNamespace(provenance={"measured_at": "2026-12-01T00:00:00+00:00"})
    deployment = SimpleNamespace(
        target=SimpleNamespace(limits=limits),
        gamma=3,
        step_table=table,
        make_loop=make_loop,
        recipe=SimpleNamespace(prefix_cache=True),
    )
    monkeypatch.setattr(engine_model, "load_deployment", lambda folder, step_table: deployment)
    with pytest.raises(MadeLoopError) as made:
        EngineModel(
            Path(),
            scheduler="off",
            limits=AdmissionLimits(max_stretch=2.5),
            metric_family=MagicMock(),
            model_name="dspark",
        )
    assert made.value.args == ({"max_stretch": 2.5, "prefix_cache": True},)


def test_default_is_that_of_the_loop() -> None:
    assert AdmissionLimits().max_stretch == DEFAULT_MAX_STRETCH


@pytest.mark.parametrize("value", [0.5, 0.0, float("nan"), float("inf")])
def test_a_step_cannot_be_shorter_than_a_plain_one(value: float) -> None:
    with pytest.raises(RecipeError, match="max_stretch: expected"):
        AdmissionLimits(max_stretch=value)
