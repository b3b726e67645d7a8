"""A server's log: quiet of what means nothing, and as data with the ids that a person looks up."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import time
from pathlib import Path

import pytest

from dspark_trt.server.server_log import ServerLog, as_record, say

TRITON_LINE = 'E1201 00:07:33.373000 9 model.cc:14] "dspark_trt.x: request 42 failed, internal error 0badcafe"'


def test_line_of_triton_becomes_a_record_with_its_ids() -> None:
    record = as_record(TRITON_LINE)
    assert (record["level"], record["logger"]) == ("error", "model.cc:14")
    assert record["message"].startswith("dspark_trt.x: request 42")
    assert (record["request_id"], record["error_id"]) == ("42", "0badcafe")


def test_line_of_any_other_form_is_kept_whole() -> None:
    assert as_record("Traceback (most recent call last):")["message"] == "Traceback (most recent call last):"
    assert "request_id" not in as_record("a request that has no number")


@pytest.mark.parametrize(
    ("log_format", "is_quiet", "num_lines"), [("text", True, 1), ("text", False, 2), ("json", True, 1)]
)
def test_standard_error_gets_what_means_something(
    monkeypatch: pytest.MonkeyPatch, log_format: str, is_quiet: bool, num_lines: int
) -> None:
    printed = io.StringIO()
    monkeypatch.setattr("sys.stderr", printed)
    log = ServerLog(None, log_format, is_quiet=is_quiet)
    output = log.open()
    assert isinstance(output, int)
    os.write(output, b'E1201 00:00:00.0 9 server.cc:241] "CudaDriverHelper has not been initialized."\n')
    os.write(output, TRITON_LINE.encode() + b"\n")
    log.opened()
    deadline = time.monotonic() + 60
    while printed.getvalue().count("\n") < num_lines and time.monotonic() < deadline:
        time.sleep(0.01)
    lines = printed.getvalue().splitlines()
    assert len(lines) == num_lines
    assert json.loads(lines[-1])["request_id"] == "42" if log_format == "json" else lines[-1] == TRITON_LINE


class Full(io.StringIO):
    """Standard error on a disk that is full for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = True

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_lines_that_cannot_be_written_are_lost_and_the_server_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody read the pipe any more after the first line, and the server stood still, or ended by SIGPIPE."""
    monkeypatch.setattr("sys.stderr", printed := Full())
    log = ServerLog(None, "text", is_quiet=True)
    output = log.open()
    assert isinstance(output, int)
    for number in range(4000):  # more than a pipe holds
        os.write(output, f"line {number} of a server that has much to say\n".encode())
    printed.is_full = False
    os.write(output, b"the last one\n")
    log.opened()
    deadline = time.monotonic() + 60
    while not printed.getvalue().endswith("the last one\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_events_of_serve_itself_survive_a_reader_that_has_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    gone = open(write, "w", encoding="utf-8")  # noqa: SIM115 closing it fails, too
    say("the server failed", gone)
    with contextlib.suppress(BrokenPipeError):
        gone.close()
    say("again", gone)


def test_log_file_goes_on_through_restarts_and_a_new_server_begins_it_anew(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of yesterday")
    log = ServerLog(tmp_path / "log", "text", is_quiet=True)
    for text in (b"first ", b"second"):
        file = log.open()
        assert not isinstance(file, int)
        file.write(text)
        log.opened()
    assert (tmp_path / "log").read_text() == "first second"
