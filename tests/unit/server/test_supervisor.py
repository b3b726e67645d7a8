"""Start and stop of a server process. The stand-in on PATH behaves like tritonserver at its worst; the real one is
tested in tests/triton."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.engines.settings import EngineSettings
from dspark_trt.errors import EngineBuildError, EnvironmentMissingError, ManifestError, RecipeError
from dspark_trt.packaging.model_repo import DEFAULT_SCHEDULER, write_model_repo
from dspark_trt.server import server_tree, tool_cache
from dspark_trt.server.arguments import server_arguments
from dspark_trt.server.options import RestartPolicy, ServeOptions, with_ports
from dspark_trt.server.processes import end_leftovers
from dspark_trt.server.serve import serve
from dspark_trt.server.server_tree import ServerTree
from dspark_trt.server.supervisor import TritonServer

# Answers like tritonserver; leaves a backend process that ignores SIGINT, and shared memory, behind.
STAND_IN = """\
#!{python}
import json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

options = dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:] if "backend-config" not in argument)
(prefix,) = [argument.rsplit("=", 1)[1] for argument in sys.argv if "shm-region-prefix-name" in argument]
repository, behaviour = Path(options["model-repository"]), {behaviour!r}
signal.signal(signal.SIGINT, signal.default_int_handler)  # as tritonserver has one of its own, in the background too
Path("/dev/shm", prefix + "region").write_text("")
stub = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
arguments = ["triton_python_backend_stub", str(repository / "dspark" / "1" / "model.py")]
child = subprocess.Popen([sys.executable, "-c", stub, *arguments])
Path({state!r}).write_text(json.dumps(dict(
    child=child.pid, prefix=prefix, repository=str(repository), environment=dict(os.environ),
    folder=os.getcwd(), scheduler=(repository / "dspark" / "config.pbtxt").read_text())))
print("I1129 12:00:00 all is well\\n| table |\\nE1129 12:00:00 model.py: the reason", flush=True)
if behaviour == "dies":
    sys.exit("error: creating server: Internal - failed to load all models")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, "")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(*((400, "engine is broken") if behaviour == "broken" else (200, '{{"text_output": "x"}}')))

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())


signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background inherits that it is ignored
if behaviour == "never ready":
    time.sleep(600)
if behaviour == "loses a model while it starts":
    time.sleep(1)
    child.kill()
    child.wait()
    time.sleep(600)
if behaviour == "dies later":
    import threading
    threading.Timer(1.5, os._exit, (1,)).start()
if behaviour == "stops late":
    signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), os._exit(0)))
HTTPServer((options["http-address"], int(options["http-port"])), Handler).serve_forever()
"""


@pytest.fixture
def build_dir(tmp_path: Path) -> Path:
    write_model_repo(tmp_path / "build", tmp_path / "build" / "triton_model_repo")
    settings = tmp_path / "build" / "engines" / "engine.json"
    settings.parent.mkdir()
    settings.write_text(EngineSettings(backend="onnxruntime").model_dump_json())
    return tmp_path / "build"


@pytest.fixture
def options(tmp_path: Path) -> ServeOptions:
    return ServeOptions(http_port=0, grpc_port=0, metrics_port=0, log_file=tmp_path / "log", startup_timeout_s=20.0)


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


@pytest.fixture
def put_on_path(tmp_path: Path, state_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(behaviour: str) -> None:
        executable = tmp_path / "bin" / "tritonserver"
        executable.parent.mkdir()
        executable.write_text(STAND_IN.format(python=sys.executable, behaviour=behaviour, state=str(state_file)))
        executable.chmod(0o755)
        monkeypatch.setenv("PATH", f"{executable.parent}{os.pathsep}{os.environ['PATH']}")

    return put


def read_state(state_file: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(state_file.read_text())
    return state


def is_running(pid: int) -> bool:
    """A process that has ended but was not reaped by its new parent does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except FileNotFoundError:
        return False


def assert_nothing_is_left(state: dict[str, Any]) -> None:
    assert not is_running(state["child"])
    assert not list(Path("/dev/shm").glob(state["prefix"] + "*"))


def test_leaving_the_block_ends_orphans_and_removes_shared_memory(
    build_dir: Path, options: ServeOptions, state_file: Path, put_on_path: Any
) -> None:
    put_on_path("works")
    with TritonServer(build_dir, options) as server:
        assert not server.has_died()
        state = read_state(state_file)
        assert is_running(state["child"])
        assert list(Path("/dev/shm").glob(state["prefix"] + "*"))
        ports = {server.options.http_port, server.options.grpc_port, server.options.metrics_port}
        assert len(ports - {0}) == 3
    assert_nothing_is_left(state)
    assert not Path(state["repository"]).exists()
    assert DEFAULT_SCHEDULER in state["scheduler"]
    assert state["environment"]["PATH"].split(os.pathsep)[0] == str(Path(sys.prefix) / "bin")


def test_another_scheduler_is_served_from_an_overlay_that_goes_away(
    build_dir: Path, options: ServeOptions, state_file: Path, put_on_path: Any
) -> None:
    put_on_path("works")
    with TritonServer(build_dir, replace(options, scheduler="fixed:3")):
        state = read_state(state_file)
    assert 'key: "scheduler" value: { string_value: "fixed:3" }' in state["scheduler"]
    assert not Path(state["repository"]).exists()
    assert DEFAULT_SCHEDULER in (build_dir / "triton_model_repo" / "dspark" / "config.pbtxt").read_text()


@pytest.mark.parametrize(
    ("behaviour", "timeout_s", "message"),
    [
        ("dies", 20.0, r"ended by itself(?s:.)*model.py: the reason\nerror: creating server"),
        ("broken", 20.0, r"ready but does not answer: engine is broken(?s:.)*model.py: the reason"),
        ("never ready", 1.0, r"is not ready after 1 s(?s:.)*model.py: the reason"),
        (
            "loses a model while it starts",
            60.0,
            r"does not start: a process of its model dspark ended while",
        ),
    ],
)
def test_server_that_does_not_come_up_shows_its_log_and_leaves_nothing(
    build_dir: Path,
    options: ServeOptions,
    state_file: Path,
    put_on_path: Any,
    behaviour: str,
    timeout_s: float,
    message: str,
) -> None:
    put_on_path(behaviour)
    with (
        pytest.raises(EngineBuildError, match=message) as caught,
        TritonServer(build_dir, replace(options, startup_timeout_s=timeout_s)),
    ):
        pass
    assert "all is well" not in str(caught.value)
    assert_nothing_is_left(read_state(state_file))


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        (ServeOptions(), ["127.0.0.1", "127.0.0.1", "127.0.0.1"]),
        (ServeOptions(address="0.0.0.0"), ["0.0.0.0", "0.0.0.0", "127.0.0.1"]),
        (ServeOptions(address="::", metrics_address="::1"), ["ipv6:::", "[::]", "ipv6:::1"]),
    ],
)
def test_metrics_are_for_this_machine_unless_their_own_address_says_otherwise(
    options: ServeOptions, bound: list[str]
) -> None:
    """S19: counts of a server's users were where its clients are."""
    arguments = dict(line.partition("=")[::2] for line in server_arguments(options, "key", "prefix"))
    assert [arguments[f"--{service}-address"] for service in ("http", "grpc", "metrics")] == bound


# Another thread, as numerical libraries start them: a signal that the main thread blocks is delivered to it.
SERVE_SCRIPT = """\
import signal, sys, threading, time
from pathlib import Path
from dspark_trt.server.serve import ServeOptions, serve
for number in (signal.SIGHUP, signal.SIGINT):  # a suite in the background or under nohup inherits that they are ignored
    signal.signal(number, signal.SIG_DFL if number == signal.SIGHUP else signal.default_int_handler)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
serve(Path(sys.argv[1]), ServeOptions(0, 0, 0), on_ready=lambda server: print(server.http_url, flush=True))
"""


@pytest.mark.parametrize(
    ("behaviour", "number", "num_signals"),
    [
        ("works", signal.SIGINT, 1),
        ("works", signal.SIGTERM, 1),
        ("works", signal.SIGHUP, 1),
        ("stops late", signal.SIGINT, 3),
    ],
)
def test_serve_ends_cleanly_on_a_signal_and_on_impatient_ones(
    build_dir: Path, state_file: Path, put_on_path: Any, behaviour: str, number: signal.Signals, num_signals: int
) -> None:
    put_on_path(behaviour)
    process = subprocess.Popen([sys.executable, "-c", SERVE_SCRIPT, build_dir], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("http://127.0.0.1:") for line in lines)
    for _ in range(num_signals):
        process.send_signal(number)
        time.sleep(0.2)
    assert process.wait(60) == 0
    process.stdout.close()
    assert_nothing_is_left(read_state(state_file))


@pytest.mark.parametrize("name", ["http_port", "grpc_port", "metrics_port"])
def test_port_in_use_is_refused_before_its_owner_is_taken_for_our_server(build_dir: Path, name: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(RecipeError, match=rf"{name}: cannot listen on 127.0.0.1 port {port} .*in use"):
            TritonServer(build_dir, replace(ServeOptions(0, 0, 0), **{name: port}))
    assert getattr(with_ports(replace(ServeOptions(0, 0, 0), **{name: port})), name) == port


@pytest.mark.parametrize(("http_port", "grpc_port"), [(99_999, 0), (-1, 0), (None, None)])
def test_ports_that_cannot_be_are_refused(http_port: int | None, grpc_port: int | None) -> None:
    free = with_ports(ServeOptions(0, 0, 0)).http_port
    with pytest.raises(RecipeError, match="cannot listen on"):
        with_ports(ServeOptions(free if http_port is None else http_port, free if grpc_port is None else grpc_port, 0))


def test_proxy_of_the_environment_is_not_asked_for_our_own_server(
    build_dir: Path, options: ServeOptions, put_on_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path("works")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with TritonServer(build_dir, options) as server:
        assert not server.has_died()


def test_keys_of_the_environment_are_not_handed_to_the_server(
    build_dir: Path, options: ServeOptions, state_file: Path, put_on_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S19: tokens of hubs and keys of clouds lay in the environment of a process that strangers talk to."""
    put_on_path("works")
    kept = {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "2", "LC_ALL": "C.UTF-8", "TMPDIR": str(build_dir)}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    secrets = ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "https_proxy", "SSH_AUTH_SOCK", "GITHUB_TOKEN", "A_NEW_SECRET"]
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    with TritonServer(build_dir, options):
        environment = read_state(state_file)["environment"]
    assert kept.items() <= environment.items()
    assert not environment.keys() & set(secrets)
    assert "secret" not in environment.values()


def test_serve_refuses_what_cannot_be_served(tmp_path: Path, build_dir: Path) -> None:
    with pytest.raises(ManifestError, match="not a finished build"):
        serve(tmp_path, ServeOptions())
    with pytest.raises(RecipeError, match="scheduler mode: expected one of"):
        serve(build_dir, ServeOptions(scheduler="fastest"))


def test_missing_libpython_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "\tlibm.so.6 => /lib/libm.so.6 (0x0)\n\tlibpython3.11.so.1.0 => not found\n"
    monkeypatch.setattr(
        tool_cache.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, listing, "")
    )
    tree = ServerTree(tmp_path / "a" / "b" / "c" / "d", tmp_path, None)
    with pytest.raises(EnvironmentMissingError, match=r"libpython3\.11\.so\.1\.0.*apt-get install libpython3\.11"):
        server_tree._check_libraries(tree, "3.11")


def test_python_without_numpy_1_is_told_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_tree.sys, "version_info", (3, 13, 0))
    monkeypatch.setattr(server_tree.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentMissingError, match=r"needs numpy 1: expected Python 3\.12 or older, found 3\.13"):
        server_tree.find_server()


FAILING_SCRIPT = """\
import sys
from pathlib import Path
from dspark_trt.errors import DSparkError
from dspark_trt.server.arguments import server_arguments
from dspark_trt.server.options import RestartPolicy
from dspark_trt.server.serve import ServeOptions, serve
policy = RestartPolicy(max_restarts=2, first_pause_s=0.05, max_pause_s=0.1)
try:
    serve(Path(sys.argv[1]), ServeOptions(0, 0, 0, restarts=policy), on_event=lambda text: print(text, flush=True))
except DSparkError as error:
    print(f"error: {error}")
    sys.exit(error.exit_code)
"""


def test_server_that_fails_again_and_again_is_given_up_loudly(
    build_dir: Path, state_file: Path, put_on_path: Any
) -> None:
    put_on_path("dies later")
    done = subprocess.run([sys.executable, "-c", FAILING_SCRIPT, build_dir], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert [line.rsplit("(", 1)[1] for line in lines if "is started again" in line] == ["1 of 2)", "2 of 2)"]
    assert lines[-1].startswith("error: the server failed 3 times and is given up; the last time: its process ended")
    assert_nothing_is_left(read_state(state_file))


def test_pause_before_a_restart_grows_to_a_limit() -> None:
    pauses = [RestartPolicy(first_pause_s=0.25, max_pause_s=15.0).pause_s(number) for number in range(5)]
    assert pauses == [0.25, 1.0, 4.0, 15.0, 15.0]


def test_server_runs_in_an_empty_folder_of_its_own(
    build_dir: Path,
    options: ServeOptions,
    state_file: Path,
    put_on_path: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S7: a json.py that lay in the folder where `serve` was started was imported by Triton's Python processes."""
    (tmp_path / "json.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    put_on_path("works")
    with TritonServer(build_dir, options):
        state = read_state(state_file)
        folder = Path(state["folder"])
        assert not list(folder.iterdir())
        assert folder.parent.stat().st_mode & 0o077 == 0, "nobody else may put something there"
    assert not folder.exists()


def test_shared_memory_prefix_is_one_that_fixed_servers_let_no_client_register(
    build_dir: Path, options: ServeOptions, state_file: Path, put_on_path: Any
) -> None:
    """S3."""
    put_on_path("works")
    with TritonServer(build_dir, options):
        assert read_state(state_file)["prefix"].startswith("triton_python_backend_shm_region_")


def test_leftovers_of_a_supervisor_that_is_gone_are_ended_and_those_of_others_stay() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    dead, alive, foreign = (
        f"triton_python_backend_shm_region_dspark_{inode}_{pid}_0badcafe_"
        for inode, pid in ((namespace, gone.pid), (namespace, os.getpid()), (1, gone.pid))
    )
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", dead], start_new_session=True)
    regions = [Path("/dev/shm", f"{prefix}region") for prefix in (dead, alive, foreign)]
    try:
        for region in regions:
            region.write_text("")
        while dead.encode() not in Path(f"/proc/{orphan.pid}/cmdline").read_bytes():
            time.sleep(0.01)  # its arguments appear a moment after it has begun
        end_leftovers()
        assert orphan.wait(10) == -signal.SIGKILL
        assert [region.exists() for region in regions] == [False, True, True]
    finally:
        orphan.kill()
        for region in regions:
            region.unlink(missing_ok=True)
