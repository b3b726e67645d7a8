"""What a person sees of a build."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from dspark_trt.commands.report import print_build


def description(**changes: Any) -> dict[str, Any]:
    """Of a build for the CPU, as `inspect_build` gives it, with what the report shows."""
    decoder = {"num_layers": 4, "hidden_size": 32, "vocab_size": 300}
    return {
        "recipe": {
            "target": "t",
            "drafter": "d",
            "precision": "fp32",
            "max_requests": 1,
            "max_seq_len": 64,
            "max_batch_tokens": 512,
        },
        "target": {"decoder": decoder},
        "drafter": {
            "decoder": decoder,
            "gamma": 3,
            "markov_rank": 0,
            "has_confidence_head": False,
            "target_layer_ids": [1],
        },
        "engine": {"backend": "onnxruntime", "library_version": None},
        "device": "CPU",
        "numerics": "float32",
        "calibration": {"kind": "neutral", "before": [], "after": []},
        "step_table": step_table([0], [1.0], 1.0),
        "stages": {"engines": {"key": "k", "created": "today", "outputs": {}}},
        "hashes_verified": False,
    } | changes


def step_table(extra_tokens: list[int], milliseconds: list[float], draft_ms: float) -> dict[str, Any]:
    return {
        "context_tokens": [128],
        "num_requests": [1],
        "extra_tokens": extra_tokens,
        "step_ms": [[milliseconds]],
        "num_slots": [2],
        "draft_ms": [[[draft_ms]]],
        "provenance": {},
    }


def shown(described: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_build(described, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_block_that_is_not_plain_is_described() -> None:
    drafter = description()["drafter"] | {
        "is_mask_first": True,
        "block_attention": [{"is_causal": False, "window": None}, {"is_causal": True, "window": 8}],
        "draft_vocab_size": 14,
    }
    text = " ".join(shown(description(drafter=drafter), 200).split())
    assert "mask first, 1 of 2 layers causal or with a window, a head for 14 ids" in text


def test_narrow_terminal_loses_no_digit_of_the_step_table() -> None:
    extra_tokens = [0, *(2**index for index in range(9))]
    milliseconds = [1234.5 + tokens for tokens in extra_tokens]
    text = shown(description(step_table=step_table(extra_tokens, milliseconds, 4321.5)), 60)
    assert all(f"{value:.1f}" in text for value in (*milliseconds, 4321.5))


def test_engines_are_shown_with_backend_version_device_and_files() -> None:
    outputs = {"engine.json": {"bytes": 9}, "target.engine": {"bytes": 2_500_000}, "target.json": {"bytes": 9}}
    engine = {"backend": "tensorrt", "library_version": "11.1.0.106"}
    stages = {"engines": {"key": "k", "created": "today", "outputs": outputs}}
    text = shown(description(engine=engine, device="NVIDIA H200 (SM 90)", stages=stages), 200)
    assert "tensorrt 11.1.0.106, fp32, for NVIDIA H200 (SM 90); target.engine 2.5 MB" in text
    assert "target.json" not in text
    assert "onnxruntime, fp32, for CPU\n" in "\n".join(line.rstrip() for line in shown(description(), 200).splitlines())


def test_calibration_says_what_it_was_fitted_on_and_what_it_brought() -> None:
    calibration = {"kind": "fitted", "num_fit_blocks": 7412, "before": [{"ece": 0.051}], "after": [{"ece": 0.018}]}
    text = shown(description(calibration=calibration), 200)
    assert "fitted on 7412 blocks; ECE at position 1: 5.1% before, 1.8% after" in text


def test_doubts_about_the_step_table_are_shown_with_what_to_do() -> None:
    table = step_table([0], [1.0], 1.0)
    told = {"measured_at": "2026-01-02", "doubts": []}
    assert "measured 2026-01-02\n" in "".join(
        f"{line.rstrip()}\n" for line in shown(description(step_table=table | {"provenance": told}), 200).splitlines()
    )
    told = told | {"doubts": ["the machine was busy"]}
    text = shown(description(step_table=table | {"provenance": told}), 200)
    assert "doubtful: the machine was busy; run `dspark-trt profile DIR`" in text
