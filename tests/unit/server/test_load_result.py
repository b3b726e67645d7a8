"""The load report: tokens are counted, not responses, and the warm-up is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.packaging.signature import ENGINE_FIELDS, PREPROCESSING_FIELDS
from dspark_trt.server.load_result import read_export

MS = 1_000_000  # nanoseconds
DATA = Path(__file__).parents[3] / "perf" / "data"


def request(sent_ms: int, chunks: list[tuple[int, int]], **last: Any) -> dict[str, Any]:
    """`chunks`: (milliseconds after sending, tokens) of each response."""
    outputs = [
        {"num_output_tokens": tokens, "num_steps": 0, "total_draft_tokens": 0, "finish_reason": ""}
        for _, tokens in chunks
    ]
    outputs[-1] |= {"num_steps": len(chunks) - 1, "total_draft_tokens": 0, "finish_reason": "length", **last}
    return {
        "timestamp": sent_ms * MS,
        "response_timestamps": [(sent_ms + after) * MS for after, _ in chunks],
        "response_outputs": outputs,
    }


def write_export(folder: Path, requests: list[dict[str, Any]]) -> Path:
    experiment = {"experiment": {"mode": "concurrency", "value": 2}, "requests": requests}
    (folder / "export.json").write_text(json.dumps({"experiments": [experiment]}))
    return folder / "export.json"


def test_numbers_are_those_of_the_tokens(tmp_path: Path) -> None:
    export = write_export(
        tmp_path,
        [  # not in the order of sending, as perf_analyzer writes them
            request(2000, [(100, 1), (300, 4), (400, 3)], total_draft_tokens=10),
            request(0, [(900, 1), (1900, 1)]),  # the warm-up
            request(1000, [(50, 1), (450, 4)], total_draft_tokens=5),
        ],
    )
    result = read_export(export, scheduler="early_stop", num_warmup=1)
    assert (result.scheduler, result.concurrency, result.num_requests, result.num_tokens) == ("early_stop", 2, 2, 13)
    assert result.tokens_per_s == pytest.approx(13 / 1.4)  # 1000 ms .. 2400 ms
    assert result.ttft_ms == pytest.approx(75)
    assert result.inter_token_ms == pytest.approx((300 / 7 + 400 / 4) / 2)
    assert result.accepted_len == pytest.approx((13 - 2) / 3)
    assert result.mean_verify_len == pytest.approx(15 / 3)


def test_request_that_did_not_end_well_is_an_error(tmp_path: Path) -> None:
    broken = write_export(tmp_path, [request(0, [(10, 1), (20, 1)], finish_reason="")])
    with pytest.raises(ValueError, match="did not end with stop or length"):
        read_export(broken, scheduler="off", num_warmup=0)


def test_prompts_are_unique_and_use_known_fields() -> None:
    rows = [row for path in sorted(DATA.glob("*.json")) for row in json.loads(path.read_text())["data"]]
    assert len({row["text_input"][0] for row in rows}) == len(rows) == 24
    known = {field.name for field in (*PREPROCESSING_FIELDS, *ENGINE_FIELDS)}
    assert all(set(row) <= known for row in rows)
