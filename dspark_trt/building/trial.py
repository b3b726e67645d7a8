"""A tokenizer and a chat template of a checkpoint are tried out in a process that may take only so much.

Both decide by themselves how much time and memory a text takes, some of it in native code that nothing can interrupt.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from dspark_trt.errors import CheckpointError, RequestError
from dspark_trt.templates.limits import TemplateLimitError
from dspark_trt.text import TextCodec

_TIMEOUT_S = 60.0
_MAX_MEMORY_BYTES = 2 * 2**30
_TEXT = "The quick brown fox jumps over 13 lazy dogs.\n"
_CHAT = [
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": _TEXT},
]


def try_text(folder: Path, source: str) -> None:
    """Encode and decode a text and render a chat with what stands in `folder` (as for `TextCodec.load`).

    Raises CheckpointError, which names `source`, where that ends badly.
    """
    command = [sys.executable, "-P", "-m", __name__, str(folder.absolute()), str(_MAX_MEMORY_BYTES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise _refusal(source, f"takes more than {_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["ended without a word"])[-1]
        limits = f"{_MAX_MEMORY_BYTES >> 20} MiB of memory"
        raise _refusal(source, f"fails ({said[:200]}; exit code {done.returncode}; it may take {limits})")


def _refusal(source: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: encoding and rendering a chat of {len(_TEXT)} characters {what}; use the tokenizer and the chat "
        "template of the model's publisher"
    )


def _try(folder: Path, max_memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (max_memory_bytes, max_memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    codec = TextCodec.load(folder)
    codec.decode(codec.encode(_TEXT))
    try:
        codec.encode_chat(_CHAT)
    except RequestError as error:  # a template may refuse what it likes
        if isinstance(error.__context__, TemplateLimitError):
            sys.exit(str(error))


if __name__ == "__main__":
    _try(Path(sys.argv[1]), int(sys.argv[2]))
