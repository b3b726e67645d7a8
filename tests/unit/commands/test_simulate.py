"""`simulate`: the deciders that serve, on blocks that no engine made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark_trt.cli import app
from dspark_trt.commands.simulation import compare, simulate_load
from dspark_trt.errors import RecipeError
from dspark_trt.steptable.table import StepTable

GAMMA = 15
SETTINGS = {"context_tokens": 256, "spread": 1.0, "num_steps": 150}


def step_ms(num_requests: int, extra_tokens: int) -> float:
    return 10 + 0.08 * max(num_requests + extra_tokens - 48, 0) + 0.001 * extra_tokens


def gpu_like() -> StepTable:
    """Flat until the device is busy, then a price for every token."""
    counts, extra = (1, 8, 32, 128), (0, 8, 32, 64, 128, 256, 512, 1024, 2048)
    return StepTable(
        num_requests=counts,
        extra_tokens=extra,
        step_ms=(tuple(tuple(step_ms(count, more) for more in extra) for count in counts),),
        draft_ms=(((0.5, 1.0),) * len(counts),),
        num_slots=(1, GAMMA),
    )


@pytest.mark.parametrize("mode", ["early_stop", "auto"])
def test_most_drafts_are_kept_at_light_load_and_fewer_at_heavy(mode: str) -> None:
    """The paper's shape: 13 of 15 at light load, 9 at heavy."""
    lens = [
        simulate_load(gpu_like(), [0.93] * GAMMA, mode, count, **SETTINGS).mean_verify_len for count in (1, 8, 32, 128)
    ]
    assert lens[0] > 11
    assert lens == sorted(lens, reverse=True)
    assert lens[-1] < 0.75 * lens[0]


def test_auto_is_not_slower_than_off_where_drafts_are_bad() -> None:
    for count in (1, 32):
        off, auto = (simulate_load(gpu_like(), [0.05] * GAMMA, mode, count, **SETTINGS) for mode in ("off", "auto"))
        assert auto.tokens_per_s > 0.98 * off.tokens_per_s


def test_off_is_the_price_of_the_plain_step() -> None:
    off = simulate_load(gpu_like(), [0.9] * GAMMA, "off", 8, **SETTINGS)
    assert off.tokens_per_s == pytest.approx(8 * 1e3 / 10)
    assert (off.mean_verify_len, off.accepted_len) == (0, 1)


def test_prediction_is_compared_with_a_measured_run() -> None:
    off = simulate_load(gpu_like(), [0.9] * GAMMA, "off", 8, **SETTINGS)
    measured = {"mode": "off", "kind": "mixed", "concurrency": 8, "tokens_per_s": {"median": 400.0}}
    (error,) = compare([off], [measured])
    assert error["error"] == pytest.approx(1.0)


def test_step_table_alone_is_enough(tmp_path: Path) -> None:
    gpu_like().save(tmp_path / "step_table.json")
    options = ["--acceptance", ".9,.8,.7", "--concurrency", "1,8", "--steps", "20", "--json"]
    result = CliRunner().invoke(app, ["simulate", str(tmp_path / "step_table.json"), *options])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["predictions"]) == 6
    result = CliRunner().invoke(app, ["simulate", str(tmp_path / "step_table.json")])
    assert isinstance(result.exception, RecipeError)


def test_build_brings_its_own_acceptance(output: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", str(output), "--concurrency", "1", "--steps", "20", "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["acceptance"]) == 5
