"""The command line: its commands, and what every error and signal ends in. The options stand with each command.

Exit codes: 0 ok, 2 user error, 3 environment missing, 4 a check failed, 128 + n ended by signal n.
"""

from __future__ import annotations

import errno
import io
import logging
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from dspark_trt import __version__
from dspark_trt.commands import (
    bench,
    build,
    calibrate,
    chat,
    convert,
    doctor,
    evaluate,
    export,
    generate,
    inspect,
    profile,
    serve,
    simulate,
    verify,
)
from dspark_trt.commands.logs import LogChoice, set_up_log
from dspark_trt.commands.options import LogFile, LogLevel, Verbose
from dspark_trt.errors import EXIT_OK, EXIT_USER_ERROR, DSparkError

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

app = typer.Typer(
    name="dspark-trt",
    help="Serve DSpark speculative decoding on compiled engines under Triton Inference Server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it takes "[default: ...]" for markup
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = (
    build.build,
    generate.generate,
    chat.chat,
    serve.serve,
    inspect.inspect,
    doctor.doctor,
    bench.bench,
    verify.verify,
    profile.profile,
    calibrate.calibrate,
    export.export,
    simulate.simulate,
    convert.convert,
)
for _command in _COMMANDS:
    app.command()(_command)
app.command("eval")(evaluate.evaluate)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"dspark-trt {__version__}")
        raise typer.Exit(EXIT_OK)


@app.callback()
def options(
    context: typer.Context,
    verbose: Verbose = False,
    log_level: LogLevel = None,
    log_file: LogFile = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    context.obj = LogChoice(verbose, log_level, log_file)


class _Signalled(BaseException):
    """A signal asked the program to end. No KeyboardInterrupt: typer would end the program without a word."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, frame: FrameType | None) -> None:
    """The first signal begins the clean-up, and none that follows may end it."""
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise _Signalled(number)


def _catch_signals() -> None:
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # of a job in the background, or under nohup
            signal.signal(number, _end)


def main() -> None:
    """Entry point: one message and the right exit code for every error that a user can cause."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character does not end the generation
    set_up_log(LogChoice())
    _catch_signals()
    try:
        app(prog_name="dspark-trt")
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        logging.getLogger("dspark_trt").info("the operating system refused", exc_info=True)
        print(f"error: {describe_refusal(error)}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except _Signalled as ended:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + ended.number)


def describe_refusal(error: OSError) -> str:
    """What the operating system refused, and what to do: a disk that is full is no file that may not be read."""
    match error:
        case PermissionError():
            return f"{error}; give this user the right to it, or choose another place"
        case FileNotFoundError() | NotADirectoryError() | IsADirectoryError():
            return f"{error}; check the path"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return f"{error}; make room, or choose another place"
    return f"{error}; give a place that can be read and written"
