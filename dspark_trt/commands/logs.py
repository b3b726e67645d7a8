"""Where the log goes and how much of it: options that stand before or behind the name of a command."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from dspark_trt.errors import RecipeError
from dspark_trt.log import attach

LEVELS = ("debug", "info", "warning", "error")
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class LogChoice:
    """What was said about the log in one place of the command line."""

    verbose: bool = False
    log_level: str | None = None
    log_file: Path | None = None

    def over(self, other: LogChoice | None) -> LogChoice:
        """This choice, and `other` where it says nothing."""
        other = other or LogChoice()
        return LogChoice(
            self.verbose or other.verbose, self.log_level or other.log_level, self.log_file or other.log_file
        )


def set_up_log(choice: LogChoice) -> None:
    """Raises RecipeError for an unknown level, or a file that cannot be written."""
    name = choice.log_level or ("info" if choice.verbose else "warning")
    if name.lower() not in LEVELS:
        raise RecipeError(f"--log-level: expected {', '.join(LEVELS)}, found {name!r}")
    level = logging.getLevelNamesMapping()[name.upper()]
    attach(RichHandler(console=console, show_path=False), level)
    if choice.log_file is None:
        return
    try:
        handler = logging.FileHandler(choice.log_file, encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"--log-file {choice.log_file}: cannot be written ({error.strerror}); give another file"
        ) from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    attach(handler, level)
