"""A build that was edited or is incomplete is refused, with one message, before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.test_cli import run

NOTHING_STARTS = (
    "import subprocess\ndef start(*a, **k): raise SystemExit('a process was started')\n"
    "subprocess.Popen.__init__ = start; "
)


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy", symlinks=True))


@pytest.mark.parametrize("command", ["serve", "inspect"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("emptied outputs", "manifest.json was edited"),
        ("edited recipe", "manifest.json was edited"),
        ("no graph", "is missing"),
        ("no repository", "is missing"),
        ("strings", "step_table.json: step_ms"),
        ("nan", "step_ms: expected milliseconds >= 0, found nan"),
        ("negative", "step_ms: expected milliseconds >= 0, found -1.0"),
        ("no values", "step_ms: expected"),
    ],
)
def test_damaged_builds_are_refused_with_code_4_before_anything_starts(
    command: str, damage: str, message: str, copied: Path
) -> None:
    spoil(copied, damage)
    result = run(command, str(copied), before=NOTHING_STARTS)
    assert result.returncode == 4, result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def spoil(build: Path, damage: str) -> None:
    def edit(path: Path, **changes: object) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    match damage:
        case "emptied outputs":
            edit(build / "graphs" / "manifest.json", outputs={})
        case "edited recipe":
            path = build / "manifest.json"
            data = json.loads(path.read_text())
            edit(path, recipe=data["recipe"] | {"max_requests": 64})
        case "no graph":
            next((build / "graphs").glob("*.onnx")).unlink()
        case "no repository":
            (build / "triton_model_repo" / "ensemble" / "config.pbtxt").unlink()
        case _:
            spoil_step_table(build, damage)


def filled(values: object, value: object) -> object:
    return [filled(each, value) for each in values] if isinstance(values, list) else value


def spoil_step_table(build: Path, damage: str) -> None:
    """As someone would who edits the table and mends the manifests that tell."""
    from dspark_trt.building.manifest import FileRecord, read_manifest, write_manifest

    path = build / "steptable" / "step_table.json"
    data = json.loads(path.read_text())
    values = {"strings": "fast", "nan": float("nan"), "negative": -1.0}
    data["step_ms"] = [] if damage == "no values" else filled(data["step_ms"], values[damage])
    path.write_text(json.dumps(data))
    manifest = read_manifest(path.parent)
    outputs = manifest.outputs | {path.name: FileRecord.of(path)}
    write_manifest(path.parent, manifest.model_copy(update={"outputs": outputs}))
