"""Works around a packaging defect of the tensorrt-rtx wheels, on Linux.

The ONNX parser opens `libtensorrt_rtx.so` when it meets the first plugin node, but the wheel has that library as
`libtensorrt_rtx.so.1` only, and the process is ended without an exception. The parser library searches beside itself.
So it is loaded through links in a folder of its own, where the second link has the name that it asks for.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import sys
import tempfile
from pathlib import Path

_MODULE = "tensorrt_rtx"
_LIBRARIES = "tensorrt_rtx_libs"
_PARSER = "libtensorrt_onnxparser_rtx.so.1"
_RUNTIME = "libtensorrt_rtx.so.1"
_ASKED_FOR = "libtensorrt_rtx.so"
_folders: list[tempfile.TemporaryDirectory[str]] = []  # the library is opened later


def provide_library_name() -> None:
    """Let the parser find its library; call it before the first import of `tensorrt_rtx`. Later calls do nothing.

    Raises ImportError when `tensorrt_rtx` has been imported already, without this.
    """
    found = importlib.util.find_spec(_LIBRARIES)
    if _folders or found is None or not found.submodule_search_locations:
        return
    installed = Path(found.submodule_search_locations[0])
    if sys.platform != "linux" or not (installed / _PARSER).exists() or (installed / _ASKED_FOR).exists():
        return
    if _MODULE in sys.modules:
        raise ImportError(
            f"{_MODULE} was imported before plugins.rtx_soname could give its parser the library {_ASKED_FOR}, and a "
            "plugin node would end the process; import it through dspark_trt_plugins.trt_plugin.load_tensorrt()"
        )
    folder = tempfile.TemporaryDirectory(prefix="tensorrt_rtx_")
    for name, target in ((_PARSER, _PARSER), (_RUNTIME, _RUNTIME), (_ASKED_FOR, _RUNTIME)):
        (Path(folder.name) / name).symlink_to(installed / target)
    ctypes.CDLL(str(Path(folder.name) / _PARSER))
    _folders.append(folder)
    atexit.register(folder.cleanup)
