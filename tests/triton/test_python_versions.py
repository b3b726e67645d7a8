"""The bundled server under every Python that it has a stub for and that is found here, and the refusal under others.

Its stub drops outputs that nobody asked for without the interpreter's lock; under CPython 3.12 that ended it at the
first answer, where the engine's model held no reference of its own.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from find_pythons import interpreters

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("python", interpreters("3.12"))
def test_bundled_server_answers_under_python_3_12(python: str, tiny_build: Path, tmp_path: Path) -> None:
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    clone = tmp_path / "clone"  # an installation writes beside the sources
    shutil.copytree(
        ROOT, clone, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "perf", "node_modules", "__pycache__")
    )
    install = [tmp_path / "venv/bin/pip", "install", "-q", f"{clone}[onnxruntime]"]
    subprocess.run(install, check=True, timeout=500)
    command = tmp_path / "venv/bin/dspark-trt"
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    server = subprocess.Popen(
        [command, "serve", tiny_build, "--step-table=keep", *ports],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        said = iter(server.stdout.readline, "")
        ready = next(line for line in said if line.startswith("ready: "))
        for _ in range(3):
            answer = ask(ready.split()[1], {"text_input": "a b", "max_tokens": 5})
            assert answer["num_output_tokens"] == 5
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def ask(url: str, request: dict[str, object]) -> dict[str, object]:
    body = json.dumps(request).encode()
    with urllib.request.urlopen(f"{url}/v2/models/ensemble/generate", body, timeout=60) as response:
        return dict(json.load(response))


@pytest.mark.parametrize("python", interpreters("3.13"))
def test_python_3_13_is_refused_in_words(python: str) -> None:
    code = (
        "import shutil; shutil.which = lambda name: None\n"
        "from dspark_trt.errors import DSparkError\n"
        "from dspark_trt.server.server_tree import find_server\n"
        "try: find_server()\n"
        "except DSparkError as error: print(error)"
    )
    said = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "expected Python 3.12 or older, found 3.13" in said
