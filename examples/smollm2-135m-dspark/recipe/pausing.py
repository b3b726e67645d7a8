"""Long runs step aside while a file exists, so that a machine can be used for something else meanwhile."""

from __future__ import annotations

import time
from pathlib import Path


def wait_while_exists(file: Path | None, poll_seconds: float = 2.0) -> float:
    """Seconds waited, 0 without a file."""
    start = time.monotonic()
    while file is not None and file.exists():
        time.sleep(poll_seconds)
    return time.monotonic() - start
