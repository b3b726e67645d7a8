"""Choose the version and sha256 of everything that `make` installs, for all Pythons that we support, into locks/.

    make lock                     # after a change of pyproject.toml: versions stay where they still fit
    make lock UPGRADE=--upgrade   # the newest versions that fit

Runs `uv`, which asks the package index for the sha256 of every file of a release. torch has builds of its own on each
index under one version, so its lock names those of PyPI, for CUDA, and of PyTorch's index, for a CPU; what the builds
for CUDA need besides stands in cuda.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
OLDEST_PYTHON = "3.11"
UV, KERNELS, SERVE, TEST = "locks/uv.txt", "locks/kernels.txt", "locks/serve.txt", "locks/test.txt"
SERVED = ("pyproject.toml", "--group=install", "--extra=onnxruntime", "--extra=client", "--extra=openai")
TESTED = (*SERVED, "--extra=reference", "--extra=tensorrt-rtx", "--extra=ray", "--group=torch-needs", "--group=dev")
TORCH, CUDA = "locks/torch.txt", "locks/cuda.txt"
# Of torch-2.13.0+cpu for x86_64 Linux, CPython 3.11 to 3.13, as https://download.pytorch.org/whl/cpu/torch/ lists them.
CPU_BUILDS = {
    "2.13.0": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    )
}


def lock(options: list[str]) -> None:
    """Write all locks, the last one with the versions of those before. Raises CalledProcessError."""
    _compile(UV, "--group=lock", *options)
    _compile(KERNELS, "--group=kernels", "--no-deps", *options)
    _compile(SERVE, *SERVED, *options)
    _compile(TEST, *TESTED, f"--constraints={KERNELS}", f"--constraints={SERVE}", *options)
    _lock_torch(options)


def _lock_torch(options: list[str]) -> None:
    """torch, for a CPU or CUDA, and what its builds for CUDA need that no other lock has."""
    (version,) = set(re.findall(r'"torch==([\w.]+)"', _read("pyproject.toml")))
    if version not in CPU_BUILDS:
        sys.exit(f"error: torch {version}: CPU_BUILDS in {__file__} names no sha256 of its CPU builds; add them")
    alone = ("-", "--no-config")  # pyproject.toml leaves torch out of all other locks
    lock_file = REPOSITORY / TORCH
    lock_file.unlink(missing_ok=True)  # or uv keeps what it does not know
    _compile(TORCH, *alone, "--no-deps", requirements=f"torch=={version}\n")
    of_cpu = "".join(f" \\\n    --hash=sha256:{digest}" for digest in CPU_BUILDS[version])
    lock_file.write_text(f"{lock_file.read_text().rstrip()}{of_cpu}\n")
    others = {name for path in (KERNELS, TEST) for name in re.findall(r"^([\w-]+)==", _read(path), re.MULTILINE)}
    left_out = [f"--no-emit-package={name}" for name in sorted({"torch", "triton", *others})]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as override:  # the kernels' own triton is installed
        override.write("triton ; sys_platform == 'never'\n")
        override.flush()
        known = (f"--override={override.name}", f"--constraints={KERNELS}", f"--constraints={TEST}")
        _compile(CUDA, *alone, *known, *left_out, *options, requirements=f"torch=={version}\n")


def _read(path: str) -> str:
    return (REPOSITORY / path).read_text()


def _compile(output: str, *arguments: str, requirements: str | None = None) -> None:
    command = ["uv", "pip", "compile", "--quiet", "--universal", f"--python-version={OLDEST_PYTHON}"]
    command += ["--generate-hashes", "--no-annotate", "--custom-compile-command=make lock"]
    command += [*arguments, f"--output-file={output}"]
    subprocess.run(command, cwd=REPOSITORY, check=True, input=requirements, text=True)


if __name__ == "__main__":
    lock(sys.argv[1:])
