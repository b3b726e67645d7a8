"""What a server says of itself at its start, from a build that nobody opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.building.build import build
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.deployment import load_deployment
from dspark_trt.errors import CapacityError
from dspark_trt.server import summary
from dspark_trt.server.options import ServeOptions
from tests.support.factories import write_drafter, write_target


@pytest.fixture(scope="module")
def build_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", vocab_size=320, head_dim=16, tokenizer=True)
    drafter = write_drafter(folder / "drafter", target)
    limits = {"max_requests": 2, "max_seq_len": 64, "max_batch_tokens": 32}
    build(BuildRecipe(target=str(target), drafter=str(drafter), num_threads=1, **limits), folder / "build")
    return folder / "build"


def test_memory_that_is_announced_is_what_the_engines_reserve(build_dir: Path) -> None:
    deployment = load_deployment(build_dir)
    pools = [
        array.nbytes
        for engine in (deployment.target, deployment.drafter)
        for array in engine._pool._arrays.values()  # type: ignore[union-attr]
    ]
    assert summary.footprint(build_dir).kv_bytes == sum(pools)


def test_build_that_needs_more_memory_than_there_is_is_refused_with_both_numbers(
    build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary.check_memory(build_dir)
    monkeypatch.setattr(summary, "memory_bytes", lambda: 1000)
    with pytest.raises(
        CapacityError, match=r"2 rows of 64 tokens take 0\.00 GB of KV memory .* has 0\.00 GB; build with"
    ):
        summary.check_memory(build_dir)


def test_summary_names_model_scheduler_memory_and_endpoints(build_dir: Path) -> None:
    where = {"http_url": "http://a:1", "grpc_address": "a:2", "metrics_url": "http://a:3/metrics"}
    text = summary.summarise(build_dir, ServeOptions(scheduler="fixed:2"), **where)
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert list(lines) == ["model", "backend", "scheduler", "memory", "admission", "endpoints"]
    assert lines["scheduler"] == "fixed:2"
    assert lines["memory"].startswith("2 rows of 64 tokens")
    assert all(address in lines["endpoints"] for address in where.values())
