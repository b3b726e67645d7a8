"""The private way to the engine model: answered one command at a time, and not lost to one that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark_trt.serving.control import ControlServer, send_command


def test_command_is_obeyed_and_answered_and_a_failing_one_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.write_text("of a process that was killed")

    def obey(command: Any) -> dict[str, Any]:
        return {"twice": 2 * command["number"]}

    server = ControlServer(path, obey)
    assert send_command(path, {"number": 21}) == {"twice": 42}
    with pytest.raises(ConnectionError):
        send_command(path, {"wrong": 1})
    assert send_command(path, {"number": 4}) == {"twice": 8}
    server.close()
    with pytest.raises(OSError, match=r"No such file|refused"):
        send_command(path, {"number": 1})
