"""Choose the version and sha256 of everything that `make` installs, for all Pythons that we support, into locks/.

    make lock                     # after a change of pyproject.toml: versions stay where they still fit
    make lock UPGRADE=--upgrade   # the newest versions that fit

Runs `uv`, which asks the package index for the sha256 of every file of a release. torch stands in no lock: each index
has its own build of it under the same version.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
OLDEST_PYTHON = "3.11"
UV, KERNELS, SERVE, TEST = "locks/uv.txt", "locks/kernels.txt", "locks/serve.txt", "locks/test.txt"
SERVED = ("pyproject.toml", "--group=install", "--extra=onnxruntime", "--extra=client", "--extra=openai")
TESTED = (*SERVED, "--extra=reference", "--extra=tensorrt-rtx", "--extra=ray", "--group=torch-needs", "--group=dev")


def lock(options: list[str]) -> None:
    """Write all locks, the last one with the versions of those before. Raises CalledProcessError."""
    _compile(UV, "--group=lock", *options)
    _compile(KERNELS, "--group=kernels", "--no-deps", *options)
    _compile(SERVE, *SERVED, *options)
    _compile(TEST, *TESTED, f"--constraints={KERNELS}", f"--constraints={SERVE}", *options)


def _compile(output: str, *arguments: str) -> None:
    command = ["uv", "pip", "compile", "--quiet", "--universal", f"--python-version={OLDEST_PYTHON}"]
    command += ["--generate-hashes", "--no-annotate", "--custom-compile-command=make lock"]
    subprocess.run([*command, *arguments, f"--output-file={output}"], cwd=REPOSITORY, check=True)


if __name__ == "__main__":
    lock(sys.argv[1:])
