"""Writes docs/command_line.md: the help of every command as it is printed, and a transcript that was recorded.

python build_scripts/command_line_page.py          # rewrites the help; the transcript stays
"""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from dspark_trt.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "command_line.md"
MARK = "## Help\n"
WIDTH = "110"


def help_section() -> str:
    """Everything from the heading `Help` on."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return MARK + "".join(_block(arguments) for arguments in ([], *([name] for name in commands)))


def _block(arguments: list[str]) -> str:
    shown = CliRunner().invoke(app, [*arguments, "--help"], prog_name="dspark-trt", env={"TERMINAL_WIDTH": WIDTH})
    command = " ".join(["dspark-trt", *arguments, "--help"])
    lines = [f"    {line}".rstrip() for line in f"$ {command}\n{shown.stdout}".splitlines()]
    return "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    recorded, _, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(recorded + help_section())
