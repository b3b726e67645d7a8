"""Temperatures and prices of a build in the files that other engines read, and how those serve the same pair.

| | TensorRT-LLM | SGLang |
|---|---|---|
| read in | 1.4.0rc4 documentation, branches that load the cost table | package 0.5.23 |
| temperatures | `sts_temperatures`, else `temperatures` | `temperatures`, one a slot |
| prices | milliseconds: `fixed_overhead_ms`, `batch_sizes` / `batch_overhead_ms`, `token_counts` / `step_time_ms` | \
seconds: `bias_seconds`, `bs_probes` / `alpha_seconds`, `m_probes` / `theta_seconds` |
| tokens | one and its drafts for each request | the same |
| between probes | linear, the outermost beyond (an early profiler: floor) | linear, the outermost beyond |
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dspark_trt.calibration.file import CalibrationFile
from dspark_trt.steptable.additive import AdditiveCost

TEMPERATURES, COST_TABLE, CONFIG, START = "temperatures.json", "cost_table.json", "serve.yaml", "serve.sh"
MINIMUM_GAIN = 0.01  # what TensorRT-LLM asks a shorter verification to promise: its own profiler's figure


@dataclass(frozen=True, slots=True)
class Exported:
    """What goes into the files."""

    target: str  # checkpoint: a path or a hub id
    drafter: str
    gamma: int
    folder: Path  # where the files will lie, absolute
    calibration: CalibrationFile
    cost: AdditiveCost
    context_tokens: int


def tensorrt_llm(build: Exported) -> dict[str, str]:
    """File name → text."""
    cost = build.cost
    prices = {
        "token_counts": list(cost.batch_tokens),
        "step_time_ms": list(cost.theta_ms),
        "fixed_overhead_ms": cost.bias_ms,
        "batch_sizes": list(cost.num_requests),
        "batch_overhead_ms": list(cost.alpha_ms),
        "minimum_predicted_gain": MINIMUM_GAIN,
        "_meta": {"writer": "dspark-trt export", "context_tokens": build.context_tokens},
    }
    temperatures = {"sts_temperatures": list(build.calibration.temperatures), **_temperatures(build.calibration)}
    config = {
        "speculative_config": {
            "decoding_type": "DSpark",
            "speculative_model": build.drafter,
            "max_draft_len": build.gamma,
            "use_rejection_sampling": True,  # else requests that sample are matched exactly
            "enable_confidence_scheduling": True,
            "confidence_cost_table_path": str(build.folder / COST_TABLE),
            "confidence_calibration_path": str(build.folder / TEMPERATURES),
        }
    }
    start = ["trtllm-serve", build.target, "--config", str(build.folder / CONFIG)]
    return {
        TEMPERATURES: _json(temperatures),
        COST_TABLE: _json(prices),
        CONFIG: yaml.safe_dump(config, sort_keys=False),
        START: _script(start),
    }


def sglang(build: Exported) -> dict[str, str]:
    """File name → text."""
    cost = build.cost
    prices = {
        "bias_seconds": cost.bias_ms / 1e3,
        "bs_probes": list(cost.num_requests),
        "alpha_seconds": [each / 1e3 for each in cost.alpha_ms],
        "m_probes": list(cost.batch_tokens),
        "theta_seconds": [each / 1e3 for each in cost.theta_ms],
    }
    start = ["python", "-m", "sglang.launch_server", "--model-path", build.target]
    start += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", build.drafter]
    start += ["--speculative-dspark-block-size", str(build.gamma)]
    start += ["--speculative-dspark-sps-table-path", str(build.folder / COST_TABLE)]
    start += ["--speculative-dspark-confidence-sts-path", str(build.folder / TEMPERATURES)]
    return {
        TEMPERATURES: _json(_temperatures(build.calibration)),
        COST_TABLE: _json(prices),
        # in its default mode, static, every draft is verified and the table is not used
        START: _script(start, environment={"SGLANG_RAGGED_VERIFY_MODE": "compact"}),
    }


FORMS: dict[str, Callable[[Exported], dict[str, str]]] = {"tensorrt-llm": tensorrt_llm, "sglang": sglang}


def _temperatures(calibration: CalibrationFile) -> dict[str, Any]:
    held_out = calibration.before[0]["num_blocks"] if calibration.before else 0
    return {
        "temperatures": list(calibration.temperatures),
        "dataset": f"held-out prompts of dspark-trt calibrate ({calibration.kind})",
        "num_samples": held_out,
        "ece_before": [each["ece"] for each in calibration.before],
        "ece_after": [each["ece"] for each in calibration.after_temperatures],
    }


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _script(command: list[str], environment: dict[str, str] | None = None) -> str:
    settings = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (environment or {}).items())
    return f'#!/bin/sh\n{settings}exec {shlex.join(command)} "$@"\n'
