"""Sends the library's log records to Triton's own log."""

from __future__ import annotations

import logging
from typing import Any


class TritonLogHandler(logging.Handler):
    """`triton_logger` is `triton_python_backend_utils.Logger`, handed in by the model."""

    def __init__(self, triton_logger: Any) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self._triton_logger = triton_logger

    def emit(self, record: logging.LogRecord) -> None:
        message = self.format(record)
        if record.levelno >= logging.ERROR:
            self._triton_logger.log_error(message)
        elif record.levelno >= logging.WARNING:
            self._triton_logger.log_warn(message)
        else:
            self._triton_logger.log_info(message)
