"""What a person sees of a build."""

from __future__ import annotations

import io

from rich.console import Console

from dspark_trt.report import print_build


def test_narrow_terminal_loses_no_digit_of_the_step_table() -> None:
    batch_tokens = [2**index for index in range(10)]
    milliseconds = [1234.5 + tokens for tokens in batch_tokens]
    decoder = {"num_layers": 4, "hidden_size": 32, "vocab_size": 300}
    description = {
        "recipe": {
            "target": "t",
            "drafter": "d",
            "precision": "fp32",
            "max_slots": 1,
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
        "calibration": {"kind": "neutral"},
        "step_table": {
            "batch_tokens": batch_tokens,
            "num_requests": [1],
            "step_ms": [milliseconds],
            "draft_ms": [4321.5],
        },
        "stages": {"engines": {"key": "k", "created": "today", "outputs": {}}},
        "hashes_verified": False,
    }
    console = Console(file=io.StringIO(), width=60)
    print_build(description, console)
    shown = console.file.getvalue()
    assert all(f"{value:.1f}" in shown for value in (*milliseconds, 4321.5))
