"""The container files: what their linter says, what they may copy, whom they run as; and their own steps, in a folder.

No image is built here: that needs a registry. The steps that make the environment are run as they stand, with another
folder in place of /opt/dspark, and packages that are installed here in place of those of the same lock.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from dspark_trt import __version__
from dspark_trt.files import default_cache_folder
from dspark_trt.server.server_tree import LAST_PYTHON, find_server
from tests.unit.test_deploy_cluster import OPTIONS, ROUTES, pods

REPOSITORY = Path(__file__).parents[2]
CONTAINERS = ["cpu", "gpu"]
PREFIX = "/opt/dspark"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def path_of(name: str) -> Path:
    return REPOSITORY / "deploy" / f"{name}.Dockerfile"


def instructions(name: str) -> list[tuple[str, str]]:
    """Each instruction and its words, continued lines joined."""
    text = re.sub(r"^#.*\n", "", path_of(name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in text.splitlines() if line.strip()]


def words(name: str, instruction: str) -> list[str]:
    return [text for kind, text in instructions(name) if kind == instruction]


def copied(name: str) -> list[str]:
    """What comes from the repository."""
    given = [text.split() for text in words(name, "COPY") if not text.startswith("--from")]
    return [source for *sources, _ in given for source in sources]


@pytest.mark.parametrize("name", CONTAINERS)
def test_linter_finds_nothing(name: str) -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    run = subprocess.run([hadolint, path_of(name)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")


@pytest.mark.parametrize("name", CONTAINERS)
def test_only_what_the_context_lets_through_is_copied(name: str) -> None:
    ignored, *patterns = [
        line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    assert ignored == "*"
    let_through = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    assert {source.split("/")[0] for source in copied(name)} == let_through
    for source in copied(name):
        assert (REPOSITORY / source).exists(), source


@pytest.mark.parametrize("name", CONTAINERS)
def test_everything_that_is_installed_has_its_sha256(name: str) -> None:
    """But for the package itself, and TensorRT, whose packages fetch libraries of their own."""
    for command in " && ".join(words(name, "RUN")).split(" && "):
        arguments = shlex.split(command)
        if "install" not in arguments:
            continue
        if "--requirement" in arguments:
            assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(arguments)
            locks = [value for option, value in itertools.pairwise(arguments) if option == "--requirement"]
            assert all((REPOSITORY / lock).exists() for lock in locks)
        else:
            assert arguments[-1] in {".", "tensorrt==${TENSORRT}"}


@pytest.mark.parametrize("name", CONTAINERS)
def test_container_has_no_rights_and_starts_as_the_examples_of_kubernetes_do(name: str) -> None:
    assert words(name, "USER")[-1] == "1000:1000"
    assert instructions(name)[-1][0] == "CMD", "nothing runs as root behind USER"
    security = pods()["kubernetes"]["securityContext"]
    assert (security["runAsUser"], security["runAsNonRoot"]) == (1000, True)
    (entry,) = json.loads(words(name, "ENTRYPOINT")[0])
    assert Path(entry).parent == Path(PREFIX) / "bin"
    assert Path(entry).name in PROJECT["project"]["scripts"]
    command, _, *arguments = json.loads(words(name, "CMD")[0])
    assert command == "serve"
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert options.keys() <= OPTIONS
    assert options["--openai-port"] in words(name, "EXPOSE")[0].split()
    asked = re.search(rf"http://127.0.0.1:{options['--openai-port']}(/\w+)", words(name, "HEALTHCHECK")[0])
    assert asked is not None
    assert asked[1] in ROUTES


def test_steps_of_the_container_make_an_environment_that_starts_and_has_a_server(tmp_path: Path) -> None:
    """Of nothing but what they copy. The server's wheel is taken from where it was unpacked and checked before."""
    source, prefix = tmp_path / "source", tmp_path / "prefix"
    for name in copied("cpu"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, source / name)
    make, install, unpack = words("cpu", "RUN")
    python3 = os.environ | {"PATH": f"{sys.base_prefix}/bin{os.pathsep}{os.environ['PATH']}"}  # the one that runs this
    subprocess.run(make.split(" && ")[0].replace(PREFIX, str(prefix)), shell=True, env=python3, check=True)
    (packages,) = prefix.glob("lib/*/site-packages")
    (packages / "locked.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    has_server = sys.version_info[:2] <= LAST_PYTHON  # as the base of the image must be
    if has_server:
        find_server()
    cache = prefix / "cache" / default_cache_folder().name
    cache.parent.mkdir()
    cache.symlink_to(default_cache_folder())
    (environment,) = {text.replace(PREFIX, str(prefix)) for text in words("cpu", "ENV") if "PYTHON" not in text}
    settings = os.environ | dict([environment.split("=", 1)])
    for step in (install, unpack) if has_server else (install,):
        subprocess.run(step.replace(PREFIX, str(prefix)), shell=True, cwd=source, env=settings, check=True)
    (entry,) = json.loads(words("cpu", "ENTRYPOINT")[0])
    shutil.rmtree(source)
    said = subprocess.run([entry.replace(PREFIX, str(prefix)), "--version"], capture_output=True, text=True, check=True)
    assert __version__ in said.stdout
    assert (
        str(prefix)
        in subprocess.run(
            [prefix / "bin/python", "-c", "import dspark_trt_model_repo as package; print(package.__path__)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
