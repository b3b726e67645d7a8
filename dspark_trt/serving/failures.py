"""What a client may learn of a failure: the text of a RequestError, or an id under which the log has the rest."""

from __future__ import annotations

import logging
import secrets
from enum import Enum

logger = logging.getLogger(__name__)


class Failure(Enum):
    """Why a request has no (further) answer."""

    INVALID_ARG = "the client is wrong"
    INTERNAL = "we are wrong"
    CANCELLED = "the client ended it"
    UNAVAILABLE = "the server is busy or stops"
    TIMEOUT = "its time is over"

    @property
    def triton_code(self) -> str:
        """The name of Triton's error code; there is none for time that is over."""
        return "UNAVAILABLE" if self is Failure.TIMEOUT else self.name


def describe_failure(what: str, error: BaseException) -> str:
    """Log an error in full and return what a client may read of it: an id to look it up by."""
    error_id = secrets.token_hex(4)
    logger.error("internal error %s: %s", error_id, what, exc_info=error)
    return f"internal error {error_id}; the server's log says more"
