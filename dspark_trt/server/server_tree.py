"""A tritonserver to start: the one on PATH, or a private tree unpacked from the `nvidia-pytriton` wheel.

The tree keeps the wheel's own layout, because its libraries are found relative to each binary (ADR 5 says why a wheel):

    <cache>/tritonserver-<wheel version>-py<X.Y>/
        pytriton/tritonserver/bin/tritonserver
        pytriton/tritonserver/backends/python/    backend library, utilities, the stub of this Python version
        nvidia_pytriton.libs/                     the libraries of all of them
        python/                                   numpy 1.26, for the models in the server only

The server runs in the last folder: the interpreter that its backend embeds ignores PYTHONPATH, but looks there first.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.errors import EnvironmentMissingError
from dspark_trt.server.environment import engine_environment
from dspark_trt.server.tool_cache import (
    Wheel,
    assemble,
    default_cache_folder,
    download_wheel,
    missing_libraries,
    prepend,
)

WHEEL = Wheel(  # carries Triton 2.51.0
    "nvidia-pytriton", "0.7.0", ("21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df",)
)
NUMPY = Wheel(  # the last release of numpy 1
    "numpy",
    "1.26.4",
    (
        "666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5",  # Python 3.11
        "675d61ffbfa78604709862923189bad94014bef562cc35cf61d3a07bba02a7ed",  # Python 3.12
    ),
)
TREE_DIGESTS = {
    "3.11": "5f4e584ce3ee8c76e1c4b18c6e822d58f0df1fb978244e6e9f6805c7aa3a83bf",
    "3.12": "c38453a681820a0ef5032619e357cb59aff450ef32fa33e00b506baaebaeeeca",
}  # by Python: what the two wheels unpack to
LAST_PYTHON = (3, 12)  # that numpy 1 was released for
_SERVER = "pytriton/tritonserver"
_LIBRARIES = "nvidia_pytriton.libs"


@dataclass(frozen=True, slots=True)
class ServerTree:
    """Where the server and its Python backend live."""

    executable: Path
    backend_directory: Path | None = None  # None: the server knows its own
    working_directory: Path | None = None  # where the server must run; None: anywhere

    def environment(self) -> dict[str, str]:
        """What of our environment the server is given, and where it finds this interpreter's packages and libpython."""
        environment = engine_environment()
        # The backend's stub embeds the `python3` that comes first on PATH, and with it that environment's packages.
        prepend(environment, "PATH", _interpreter_folder())
        prepend(environment, "LD_LIBRARY_PATH", _own_libpython_folder())
        return environment


def find_server() -> ServerTree:
    """The tritonserver on PATH, else the private tree in `default_cache_folder()`, assembled if need be.

    Raises EnvironmentMissingError when the wheel cannot be had or a library that the server loads is missing.
    """
    installed = shutil.which("tritonserver")
    if installed is not None:
        return ServerTree(executable=Path(installed))
    if sys.version_info[:2] > LAST_PYTHON:
        raise EnvironmentMissingError(
            f"no tritonserver on PATH, and the one inside {WHEEL} needs numpy 1: expected "
            f"Python {LAST_PYTHON[0]}.{LAST_PYTHON[1]} or older, found {sys.version_info[0]}.{sys.version_info[1]}; "
            "run dspark-trt under that one (make PYTHON=python3.12), or put a tritonserver on PATH"
        )
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    root = default_cache_folder() / f"tritonserver-{WHEEL.version}-py{python}"
    assemble(root, lambda scratch, contents: _fill(scratch, contents, python), TREE_DIGESTS[python])
    tree = ServerTree(root / _SERVER / "bin/tritonserver", root / _SERVER / "backends", root / "python")
    _check_libraries(tree, python)
    return tree


def _fill(scratch: Path, contents: Path, python: str) -> None:
    """Unpack what a server needs of the two wheels."""
    stub = f"{_SERVER}/python_backend_stubs/{python}/triton_python_backend_stub"
    kept = (f"{_SERVER}/bin/", f"{_SERVER}/backends/", f"{_SERVER}/caches/", f"{_LIBRARIES}/", stub)
    with zipfile.ZipFile(download_wheel(WHEEL, scratch)) as archive:
        names = [name for name in archive.namelist() if name.startswith(kept)]
        if stub not in names:
            raise EnvironmentMissingError(
                f"{WHEEL} has no Python backend stub for Python {python}: expected {stub} in "
                "the wheel; run dspark-trt under Python 3.11, or put a tritonserver of this Python on PATH"
            )
        archive.extractall(contents, names)
    with zipfile.ZipFile(download_wheel(NUMPY, scratch)) as archive:
        archive.extractall(contents / "python")
    backend = contents / _SERVER / "backends/python"
    shutil.move(contents / stub, backend / "triton_python_backend_stub")
    for binary in (backend / "triton_python_backend_stub", contents / _SERVER / "bin/tritonserver"):
        binary.chmod(0o755)


def _check_libraries(tree: ServerTree, python: str) -> None:
    """Ask the loader: without its libraries the stub dies silently and the server waits for it until a timeout."""
    assert tree.backend_directory is not None
    stub = tree.backend_directory / "python/triton_python_backend_stub"
    for binary in (tree.executable, stub):
        missing = missing_libraries(binary, tree.environment())
        if missing:
            libpython = f"libpython{python}.so.1.0"
            remedy = (
                f"install it with: apt-get install libpython{python}"
                if missing == [libpython]
                else f"install the packages that hold them, or delete {tree.executable.parents[3]} to fetch it again"
            )
            raise EnvironmentMissingError(f"{binary} needs {', '.join(missing)}, which this machine lacks; {remedy}")


def _interpreter_folder() -> Path:
    """The folder whose `python3` is the running environment."""
    in_environment = sys.prefix != sys.base_prefix
    return Path(sys.prefix) / "bin" if in_environment else Path(sys.executable).parent


def _own_libpython_folder() -> Path | None:
    """Where the running interpreter's shared library is; None when it is linked statically."""
    name, folder = sysconfig.get_config_var("INSTSONAME"), sysconfig.get_config_var("LIBDIR")
    if not name or not folder or ".so" not in name or not (Path(folder) / name).exists():
        return None
    return Path(folder)
