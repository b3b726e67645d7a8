"""What a message tells to install can be installed from where packages are had."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dspark_trt.machine.packages import install_extra

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("extra", "package"),
    [("onnxruntime", "onnxruntime=="), ("client", "tritonclient[grpc]"), ("tensorrt-rtx", "tensorrt-rtx-cu13")],
)
def test_extras_are_told_by_the_packages_that_they_stand_for(extra: str, package: str) -> None:
    assert install_extra(extra).startswith("pip install ")
    assert package in install_extra(extra)


def test_no_message_and_no_page_installs_this_package_from_an_index_that_lacks_it() -> None:
    found = subprocess.run(
        [
            "git",
            "grep",
            "-n",
            "pip install.*dspark-trt\\[",
            "--",
            "dspark_trt",
            "plugins",
            "docs",
            "README.md",
            "Makefile",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (1, "")
