"""Logging of the library: one logger tree, no handlers of its own.
The command line and the Triton model attach theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable

Progress = Callable[[float], None]  # called with the fraction done, 0..1

ROOT = "dspark_trt"


def get_logger(name: str) -> logging.Logger:
    """The logger of one module."""
    return logging.getLogger(name if name.startswith(ROOT) else f"{ROOT}.{name}")


def attach(handler: logging.Handler, level: int = logging.INFO) -> None:
    """Send the library's records to `handler`; calling it again with the same kind of handler replaces it."""
    logger = logging.getLogger(ROOT)
    logger.handlers = [known for known in logger.handlers if type(known) is not type(handler)]
    logger.addHandler(handler)
    logger.setLevel(level)
