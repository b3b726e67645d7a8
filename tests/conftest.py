"""Fixtures that several test folders share. What is missing is fetched or built, never skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from fetch_demo_target import fetch

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def demo_target_path() -> Path:
    """The GGUF file of the demonstration target."""
    return fetch(REPOSITORY / "build" / "downloads")


@pytest.fixture(scope="session")
def demo_drafter_path() -> Path:
    return REPOSITORY / "examples" / "smollm2-135m-dspark"
