"""Fixtures that several test folders share. What is missing is fetched or built, never skipped.

Imports stand inside: the kernel tests of tests/gpu run on hosts that have torch and triton but not all of the package's
own dependencies.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dspark_trt.deployment import Deployment

REPOSITORY = Path(__file__).parent.parent
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # some tests import onnxruntime themselves


@pytest.fixture(scope="session")
def demo_target_path() -> Path:
    """The GGUF file of the demonstration target."""
    from fetch_demo_target import fetch

    return fetch(REPOSITORY / "build" / "downloads")


@pytest.fixture(scope="session")
def demo_drafter_path() -> Path:
    return REPOSITORY / "examples" / "smollm2-135m-dspark"


@pytest.fixture(scope="session")
def demo_build(demo_target_path: Path, demo_drafter_path: Path) -> Path:
    """The demonstration build at build/smollm2: made once, kept while nothing it depends on changes."""
    from dspark_trt.building.build import build
    from dspark_trt.building.recipe import BuildRecipe

    output = REPOSITORY / "build" / "smollm2"
    with (REPOSITORY / "build" / "smollm2.lock").open("w") as lock:  # the two halves of `make test` ask for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(BuildRecipe(target=str(demo_target_path), drafter=str(demo_drafter_path)), output)
    return output


@pytest.fixture(scope="session")
def demo(demo_build: Path) -> Deployment:
    from dspark_trt.deployment import load_deployment

    return load_deployment(demo_build)


@pytest.fixture(scope="session")
def tiny_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_build import make_tiny_build

    return make_tiny_build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def ngram_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target built without a drafter: do not write into it."""
    from tests.support.tiny_build import make_ngram_build

    return make_ngram_build(tmp_path_factory.mktemp("ngram"))
