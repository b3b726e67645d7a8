"""The exception tree of the project and the exit codes of the command line.

Every message says four things: what is wrong, where, what was expected against what was found, and what to do next.
`assert` is for invariants of our own; everything a user can cause is one of these.
"""

from __future__ import annotations

from collections.abc import Iterable

EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_ENVIRONMENT_MISSING = 3
EXIT_CHECK_FAILED = 4
_MAX_SHOWN = 120  # characters of a value in a message
_MAX_MESSAGE = 2500  # characters of one that quotes a file


class DSparkError(Exception):
    """Base of all errors that are reported to a person as one message, without a traceback."""

    exit_code = EXIT_USER_ERROR


class _AboutAFile(DSparkError):
    """What is wrong in a file of somebody else. A message that quotes too much of it is cut in the middle."""

    def __init__(self, message: str) -> None:
        is_long = len(message) > _MAX_MESSAGE
        super().__init__(f"{message[: _MAX_MESSAGE - 500]} … {message[-400:]}" if is_long else message)


class RecipeError(_AboutAFile):
    """The build recipe or a command-line option is not acceptable."""


class CheckpointError(_AboutAFile):
    """A checkpoint cannot be read, is of an unknown family, or its tensors do not fit its configuration."""


class PairingError(_AboutAFile):
    """Target and drafter do not belong together."""


class ExportError(DSparkError):
    """A checkpoint cannot be expressed as a graph."""


class EngineBuildError(DSparkError):
    """A graph cannot be compiled, or a compiled engine cannot be loaded or run."""


class ManifestError(DSparkError):
    """A build directory is incomplete, was changed by hand, or was made from other inputs."""

    exit_code = EXIT_CHECK_FAILED


class EnvironmentMissingError(DSparkError):
    """This machine lacks a package, a library or a device that the command needs."""

    exit_code = EXIT_ENVIRONMENT_MISSING


class CapacityError(DSparkError):
    """A limit that was fixed at build time (rows, sequence length, tokens of one step) would be exceeded."""


class RequestError(DSparkError):
    """A client's request is not acceptable. The only error whose text reaches a client."""


def place(parts: Iterable[object]) -> str:
    """Where in a file an error is, from the parts that pydantic gives: a.b.0. Keys are a stranger's: they are cut."""
    text = ".".join(map(str, parts))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def abridged(value: object) -> str:
    """`value` as a message shows it: a prompt of a megabyte is not printed whole."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}… ({len(text)} characters)"
