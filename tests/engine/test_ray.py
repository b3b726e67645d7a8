"""`generate`, `eval` and `calibrate` with --ray on a real cluster of two nodes: the same results as in one process,
whatever dies on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from typer.testing import CliRunner

from dspark_trt.calibration.file import load_calibration
from dspark_trt.calibration.prompts import read_prompts
from dspark_trt.cli import app
from dspark_trt.commands.prompt_file import FileSummary, unfinished
from dspark_trt.commands.ray_calibration import record_over_ray
from dspark_trt.commands.ray_generation import generate_over_ray
from dspark_trt.errors import EnvironmentMissingError

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
GIVEN = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # tells nobody
        made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            made.add_node(**NODE)
            yield made
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines: list[dict[str, Any]] = [{"prompt": f"the quick brown fox {number}"} for number in range(30)]
    lines += [{"prompt": "equal", "temperature": 1.0, "seed": 5, "draft": False}] * 3
    lines += [{"prompt": "bad", "temperature": -1}]
    path = tmp_path_factory.mktemp("prompts") / "in"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def expected(tiny_build: Path, prompts: Path) -> dict[int, Any]:
    """As one process answers."""
    output = prompts.with_name("expected")
    options = ["--max-tokens", "12", "--ignore-eos"]
    command = ["generate", str(tiny_build), "--input", str(prompts), "--output", str(output), *options]
    CliRunner().invoke(app, command, catch_exceptions=False)
    return answers(output)


def answers(output: Path) -> dict[int, Any]:
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = {line["line"]: line.get("token_ids") or line["error"] for line in lines}
    assert len(found) == len(lines), "each line once"
    return found


def children_of(pid: int, title: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(folder.joinpath("stat").read_text().rpartition(") ")[2].split()[1])
            if parent == pid and title.encode() in folder.joinpath("cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def raylet_of(node: Any) -> int:
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


def kill_a_worker(cluster: Cluster) -> None:
    workers = [pid for node in cluster.list_all_nodes() for pid in children_of(raylet_of(node), "ray::Worker")]
    assert workers
    os.kill(workers[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough blocks for a calibration of so small a pair."""
    path = tmp_path_factory.mktemp("calibration") / "short.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number:b}"[-6:]}) + "\n" for number in range(24)))
    return path


def test_calibration_records_what_one_process_records_and_resumes(
    cluster: Cluster, tiny_build: Path, short: Path, tmp_path: Path
) -> None:
    """A worker is killed while it records; then half of the records go, and the command makes them again."""
    prompts, records = read_prompts(short), tmp_path / "records"
    happened: list[float] = []

    def progress(done: float) -> None:
        if not happened:
            kill_a_worker(cluster)
        happened.append(done)

    effort: dict[str, Any] = {"budget_s": 300.0, "max_tokens": 25, "num_samples": 2}
    found = record_over_ray(cluster.address, tiny_build, prompts, **effort, records=records, progress=progress)
    assert happened[-1] == 1.0
    assert {group for _, _, _, _, group, _ in found.rows} == set(range(24))
    assert len(found.answers) == 24 * 3, "one greedy, two sampled"

    lines = records.read_text().splitlines()
    assert len(lines) == 24
    records.write_text("".join(f"{line}\n" for line in lines[:12]) + '{"line": 3, "blo')
    calibrated = {}
    over_ray = ["--ray", cluster.address, "--records", str(records)]
    for name, more in (("alone", []), ("together", over_ray)):
        folder = Path(shutil.copytree(tiny_build, tmp_path / name))
        options = ["--prompts", str(short), "--max-tokens", "25", "--samples", "2"]
        CliRunner().invoke(app, ["calibrate", str(folder), *options, *more], catch_exceptions=False)
        calibrated[name] = load_calibration(folder / "calibration" / "calibration.json")
    assert records.read_text().splitlines()[:12] == lines[:12]
    assert len(records.read_text().splitlines()) == 24
    alone, together = calibrated["alone"], calibrated["together"]
    assert alone.kind == together.kind == "fitted"
    assert together.num_fit_blocks == pytest.approx(alone.num_fit_blocks, rel=0.02), "float noise may turn a draft"
    assert together.temperatures == pytest.approx(alone.temperatures, rel=0.2)
    assert together.lookup is not None


def test_killed_worker_and_lost_node_lose_nothing(
    cluster: Cluster, tiny_build: Path, prompts: Path, expected: dict[int, Any], tmp_path: Path
) -> None:
    """First a worker is killed while it decodes; then half of the results are taken away, and a node goes while the
    second run makes them again."""
    output = tmp_path / "out"
    happened = []

    def run(happens: Any) -> FileSummary:
        def progress(done: float) -> None:
            if not happened:
                happened.append(done)
                happens()

        work = unfinished(prompts, output)
        return generate_over_ray(
            cluster.address, tiny_build, work, output, None, GIVEN, is_chat=False, progress=progress
        )

    summary = run(lambda: kill_a_worker(cluster))
    assert happened
    assert (summary.num_finished, summary.num_failed) == (33, 1)
    assert answers(output) == expected

    kept = output.read_text().splitlines()[:16]
    output.write_text("".join(f"{line}\n" for line in kept) + '{"line": 3, "te')
    happened.clear()
    summary = run(lambda: cluster.remove_node(cluster.list_all_nodes()[1]))
    assert happened
    assert summary.num_kept >= 15
    assert summary.num_finished + summary.num_kept == 33
    assert answers(output) == expected
    assert set(kept) - {line for line in kept if "error" in line} <= set(output.read_text().splitlines())


def test_evaluation_counts_what_one_process_counts(cluster: Cluster, tiny_build: Path, tmp_path: Path) -> None:
    for name, words in (("first", "a b c d"), ("second", "e f")):
        lines = [json.dumps({"prompt": f"the quick brown {word}"}) for word in words.split()]
        (tmp_path / name).write_text("\n".join(lines))
    options = ["--prompts", str(tmp_path / "first"), "--prompts", str(tmp_path / "second"), "--max-tokens", "10"]
    command = ["eval", str(tiny_build), *options, "--json"]
    records = tmp_path / "records"
    over_ray = ["--ray", cluster.address, "--records", str(records)]
    alone, together, resumed = (
        json.loads(CliRunner().invoke(app, [*command, *more], catch_exceptions=False).stdout)["sets"]
        for more in ([], over_ray, over_ray)
    )
    assert len(records.read_text().splitlines()) == 6
    assert resumed == together
    assert [each["num_prompts"] for each in together] == [4, 2]
    for one, other in zip(alone, together, strict=True):
        assert one["name"] == other["name"]
        assert one["num_steps"] == pytest.approx(other["num_steps"], abs=1), "float noise may turn a draft"
        assert one["accepted_len"] == pytest.approx(other["accepted_len"], abs=0.2)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_cluster_that_is_not_there_is_said(address: str, tmp_path: Path, tiny_build: Path, prompts: Path) -> None:
    work = unfinished(prompts, tmp_path / "out")
    with pytest.raises(EnvironmentMissingError, match=f"--ray {address}: cannot connect .*ray start --head"):
        generate_over_ray(
            address, tiny_build, work, tmp_path / "out", None, {}, is_chat=False, progress=lambda done: None
        )


def test_missing_package_and_missing_file_are_said(tiny_build: Path, prompts: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from dspark_trt.cli import main; main()"
    files = ["--input", str(prompts), "--output", str(prompts.with_name("never"))]
    for arguments, status, message in (
        (["--ray", "auto", *files], 3, "--ray needs the package ray, which is not installed; install it here and"),
        (["--ray", "auto", "--prompt", "a"], 2, "--ray: expected with --input and --output only"),
    ):
        command = [sys.executable, "-c", code, "generate", str(tiny_build), *arguments]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (said.returncode, message in said.stderr) == (status, True), said.stderr
