"""A second server: another place, another engine name, another scheduler, and nothing left when it has stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_trt.building.build import build
from dspark_trt.building.finished import read_finished
from dspark_trt.building.reprofile import own_table
from dspark_trt.commands.generation import generate as generate_here
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.deployment import load_deployment
from dspark_trt.server.load_test import Row, measure, measure_over_http
from dspark_trt.server.options import ServeOptions, with_ports
from dspark_trt.server.perf_analyzer import find_perf_analyzer
from dspark_trt.server.server_tree import find_server
from dspark_trt.server.supervisor import TritonServer
from dspark_trt.serving.limits import AdmissionLimits
from tests.support.triton_clients import generate, metrics

pytestmark = pytest.mark.triton

PROMPT = "A recipe for apple cake:"


def commands_that_mention(text: str) -> list[str]:
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended meanwhile
            continue
        if text in command:
            commands.append(command)
    return commands


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def moved(tiny_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build in another place, its engine model called as in TensorRT-LLM's repository."""
    moved = shutil.copytree(tiny_build, tmp_path_factory.mktemp("elsewhere") / "build", copy_function=os.link)
    recipe = read_finished(moved)[0].recipe.model_copy(update={"engine_model_name": "tensorrt_llm"})
    rebuilt = [result.stage for result in build(recipe, moved) if result.was_built]
    assert rebuilt == ["triton_model_repo"]
    return moved


@pytest.fixture(scope="module")
def expected_text(tiny_build: Path) -> str:
    """What the build itself answers."""
    deployment = load_deployment(tiny_build)
    sampling = deployment.sampling_params(max_tokens=16, temperature=0.0, ignore_eos=True)
    (answer,) = generate_here(deployment, [deployment.codec.encode(PROMPT)], sampling, parse_scheduler("off"))
    return str(answer["text"])


def test_moved_and_renamed_build_is_served_and_leaves_nothing(moved: Path, expected_text: str, tmp_path: Path) -> None:
    before = listing(moved)
    shared_memory = set(Path("/dev/shm").iterdir())
    options = ServeOptions(0, 0, 0, scheduler="off", log_file=tmp_path / "log")
    with TritonServer(moved, options) as server:
        answer = generate(server.http_url, text_input=PROMPT, max_tokens=16, temperature=0.0, end_id=-1)
        assert commands_that_mention("triton_python_backend_stub")
        processes = commands_that_mention(f"{server.options.http_port}")
        assert processes
        prefix = next(part for part in processes[0].split() if "shm-region-prefix-name" in part).rsplit("=", 1)[1]
        assert commands_that_mention(prefix)
        assert set(Path("/dev/shm").iterdir()) > shared_memory
    assert answer["text_output"] == expected_text
    assert answer["total_draft_tokens"] == 0
    assert answer["num_steps"] == 15
    assert not commands_that_mention(prefix)
    assert set(Path("/dev/shm").iterdir()) <= shared_memory
    assert listing(moved) == before


def test_plain_tritonserver_serves_the_repository_as_it_stands(moved: Path, expected_text: str, tmp_path: Path) -> None:
    """As in Triton's own container: nothing but --model-repository; ports, because others may be in use here."""
    tree, options = find_server(), with_ports(ServeOptions(0, 0, 0))
    command = [tree.executable, f"--model-repository={moved / 'triton_model_repo'}"]
    if tree.backend_directory is not None:
        command.append(f"--backend-directory={tree.backend_directory}")
    for service in ("http", "grpc", "metrics"):
        command.append(f"--{service}-port={getattr(options, f'{service}_port')}")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=tree.environment(), cwd=tree.working_directory, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until_ready(process, options.http_port)
        url = f"http://127.0.0.1:{options.http_port}"
        answer = generate(url, text_input=PROMPT, max_tokens=16, temperature=0.0, end_id=-1)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert answer["text_output"] == expected_text
    assert answer["num_steps"] + answer["total_accepted_draft_tokens"] == 15, "each later step and draft gives a token"


def wait_until_ready(process: subprocess.Popen[bytes], http_port: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "tritonserver ended by itself"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{http_port}/v2/health/ready"):
            return
        time.sleep(0.1)
    raise AssertionError("tritonserver is not ready after two minutes")


def test_server_prices_steps_by_the_table_and_cuts_answers_to_the_ceiling_that_it_is_given(
    tiny_build: Path, tmp_path: Path
) -> None:
    """The metric of a table's age reads it: the build's own is minutes old. And max_tokens has the server's ceiling."""
    old = replace(own_table(tiny_build), provenance={"measured_at": "2001-02-03T00:00:00+00:00"})
    options = ServeOptions(0, 0, 0, log_file=tmp_path / "log", admission=AdmissionLimits(max_tokens=3))
    with TritonServer(tiny_build, options, old) as server:
        answer = generate(server.http_url, text_input="a", max_tokens=400, temperature=0.0, end_id=-1)
        found = metrics(server.metrics_url)
    assert (answer["num_output_tokens"], answer["finish_reason"]) == (3, "length")
    assert [value for name, value in found.items() if "step_table_age" in name and value > 20 * 365 * 86_400]


@pytest.mark.demo
@pytest.mark.parametrize("has_perf_analyzer", [True, False])
def test_load_is_measured_by_the_tokens_of_a_running_server(server: TritonServer, has_perf_analyzer: bool) -> None:
    rows: list[Row] = [
        {"text_input": [text], "max_tokens": [12], "stream": [True], "end_id": [-1]}
        for text in ("One", "Two words", "Three more words")
    ]
    if has_perf_analyzer:
        tool = find_perf_analyzer()
        result = measure(server.grpc_address, 2, "early_stop", num_requests=4, rows=rows, tool=tool)
    else:
        result = measure_over_http(server.http_url, 2, "early_stop", num_requests=4, rows=rows)
    assert (result.concurrency, result.num_requests, result.num_tokens) == (2, 4, 4 * 12)
    assert 1.0 <= result.accepted_len <= 8.0
    assert 0.0 <= result.mean_verify_len <= 7.0
    assert 0.0 < result.ttft_ms <= result.ttft_p95_ms
    assert result.inter_token_ms > 0.0
