"""Ctrl-C waits while native code calls back, and is not lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dspark_trt.building.interrupts import deferred_interrupt
from tests.support.factories import write_drafter, write_target


@pytest.fixture(autouse=True)
def handler() -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_signal_raises_where_it_is_asked_for_and_not_before() -> None:
    reached = []

    def work() -> None:
        with deferred_interrupt() as check:
            check()
            signal.raise_signal(signal.SIGINT)
            reached.append("behind the signal")
            check()
            reached.append("behind the check")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["behind the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signal_that_nobody_asked_for_ends_the_block() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        signal.raise_signal(signal.SIGINT)


def test_what_an_interruption_led_to_is_told_as_an_interruption() -> None:
    def work() -> None:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("the native code gave nothing")

    with pytest.raises(KeyboardInterrupt):
        work()


def test_block_without_a_signal_changes_nothing() -> None:
    with pytest.raises(ValueError, match="of the block"), deferred_interrupt():
        raise ValueError("of the block")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_handler_of_the_program_stays_in_charge() -> None:
    caught = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    with deferred_interrupt() as check:
        signal.raise_signal(signal.SIGINT)
        check()
    assert caught == [signal.SIGINT]


def test_other_threads_can_use_it() -> None:
    done = []

    def work() -> None:
        with deferred_interrupt() as check:
            check()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_ctrl_c_ends_the_compiler_and_leaves_no_engines(tmp_path: Path) -> None:
    """The compiler's callbacks run in the main thread:
    an exception that a signal raises there is printed and forgotten."""
    target = write_target(tmp_path / "target", vocab_size=320, head_dim=16, tokenizer=True)
    drafter = write_drafter(tmp_path / "drafter", target)
    pair = ["--target", str(target), "--drafter", str(drafter), "--max-requests", "2", "--max-seq-len", "64"]
    backend = ["--backend", "tensorrt_rtx", "--compute-capability", "89"]
    command = ["build", *pair, *backend, "--max-batch-tokens", "32", "--output", str(tmp_path / "out")]
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from dspark_trt.engines.tensorrt.compiler import progress as tensorrt_progress
class Monitor(tensorrt_progress.BuildMonitor):
    def __init__(self, trt, progress):
        super().__init__(trt, progress)
        start = type(self.monitor).phase_start
        def pressed(*arguments):
            type(self.monitor).phase_start = start
            signal.raise_signal(signal.SIGINT)
            start(*arguments)
        type(self.monitor).phase_start = pressed
from dspark_trt.engines.tensorrt.compiler import build as tensorrt_build
tensorrt_build.BuildMonitor = Monitor
sys.argv = ["dspark-trt", *{command!r}]
from dspark_trt.cli import main
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 130, result.stderr
    assert not (tmp_path / "out" / "engines").exists()
