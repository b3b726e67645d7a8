"""`chat` as a person meets it: through a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark_trt.commands.chat import Conversation
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import load_deployment

PROMPT = "> "


class Terminal:
    """A `dspark-trt chat` in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "dspark_trt", "chat", *arguments])
        self.shown = ""

    def type(self, line: str) -> str:
        """What is shown after `line`, up to the next prompt."""
        os.write(self.file, line.encode())
        return self.wait()

    def interrupt(self) -> str:
        """As `type`, of Ctrl-C: pressed until it is heard, as one that comes just before the program reads is not."""
        for _ in range(20):
            os.write(self.file, b"\x03")
            try:
                return self.wait(timeout_s=3)
            except AssertionError:
                continue
        raise AssertionError(f"Ctrl-C is not heard: {self.shown!r}")

    def wait(self, until: str = PROMPT, timeout_s: float = 60) -> str:
        start, deadline = len(self.shown), time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if select.select([self.file], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.file, 4096).decode(errors="replace")
                except OSError:  # the process has ended
                    return self.shown[start:]
            if self.shown[start:].endswith(until):
                return self.shown[start:]
        raise AssertionError(f"no {until!r} in {self.shown[start:]!r}")

    def end(self) -> int:
        """The exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(output: Path) -> Iterator[Terminal]:
    opened = Terminal(str(output), "--max-tokens", "5", "--temperature", "2", "--seed", "3", "--ignore-eos")
    opened.wait()
    yield opened
    try:
        os.kill(opened.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    os.close(opened.file)


def test_conversation_is_kept_reset_and_left(terminal: Terminal) -> None:
    assert "5 tokens in" in terminal.type("a\n")
    history = terminal.type("/history\n")
    assert "user: a" in history
    assert "assistant: " in history
    assert "/quit" in terminal.type("/help\n")
    assert "is forgotten" in terminal.type("/reset\n")
    assert "Nothing yet." in terminal.type("/history\n")
    assert "with this system message" in terminal.type("/system be brief\n")
    assert "max_tokens is 2 from now on" in terminal.type("/set max_tokens 2\n")
    assert "2 tokens in" in terminal.type("a\n")
    os.write(terminal.file, b"/quit\n")
    assert terminal.end() == 0


def test_mistakes_do_not_end_a_conversation(terminal: Terminal) -> None:
    assert "/sing: no such command" in terminal.type("/sing\n")
    assert "expected NAME VALUE" in terminal.type("/set colour red\n")
    assert "valid number" in terminal.type("/set temperature hot\n")
    assert "at most 64 fit" in terminal.type("a " * 300 + "\n")
    assert "Nothing yet." in terminal.type("/history\n")
    assert "/quit or Ctrl-D leaves" in terminal.interrupt()
    os.write(terminal.file, b"\x04")
    assert terminal.end() == 0


def test_ctrl_c_breaks_off_an_answer_and_forgets_the_turn(output: Path) -> None:
    terminal = Terminal(str(output), "--max-tokens", "50", "--ignore-eos", "--no-draft")
    terminal.wait()
    code = terminal.type("/set max_tokens 50\n")
    assert "from now on" in code
    os.write(terminal.file, b"a\n")
    shown = terminal.interrupt()
    assert "broken off" in shown or "leaves" in shown
    os.write(terminal.file, b"/quit\n")
    assert terminal.end() == 0


def test_a_turn_begins_behind_what_the_one_before_has_read(output: Path) -> None:
    given = {"max_tokens": 2, "ignore_eos": True, "draft": False, "temperature": 0.0}
    conversation = Conversation(load_deployment(output), SchedulerConfig("off"), given)
    first = conversation.answer("a b c d e f g h", lambda piece: None)
    second = conversation.answer("a", lambda piece: None)
    assert first["num_prompt_tokens_reused"] == 0
    assert second["num_prompt_tokens_reused"] >= first["num_prompt_tokens"] - 4  # the template's end may differ
