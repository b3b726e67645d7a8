"""The page that draws the house: every room once, in the order of the import contract, and none that is not there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()
PICTURE = PAGE.partition("```mermaid")[2].partition("```")[0]
BESIDE = PAGE.partition("| beside it |")[2].partition("\n## ")[0]
INSIDE = PAGE.partition("| room of `dspark_trt/` |")[2].partition("| beside it |")[0]


def listed(table: str) -> list[str]:
    """Names in the first column."""
    return [
        name
        for row in table.splitlines()
        for name in re.findall(r"`([\w/]+)`", row.split("|")[1:2][0] if "|" in row else "")
    ]


def layers() -> list[set[str]]:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rooms,) = (contract for contract in contracts if contract.get("containers") == ["dspark_trt"])
    return [set(re.findall(r"\(?\w+\)?", layer)) for layer in rooms["layers"]]


def packages(folder: str) -> set[str]:
    """Every package below, as a path with a slash behind it."""
    top = REPOSITORY / folder
    return {f"{path.parent.relative_to(top)}/" for path in top.rglob("__init__.py") if path.parent != top}


def modules() -> set[str]:
    return {path.stem for path in (REPOSITORY / "dspark_trt").glob("*.py") if not path.stem.startswith("__")}


def announced() -> set[str]:
    """Rooms that the contract has a place for and that need not be there yet."""
    return {f"{name.strip('()')}/" for layer in layers() for name in layer if name.startswith("(")}


def test_every_room_has_one_line_and_every_line_has_a_room() -> None:
    rooms = listed(INSIDE)
    assert len(rooms) == len(set(rooms))
    assert set(rooms) - announced() == (packages("dspark_trt") | modules()) - announced()
    beside = set(listed(BESIDE)) - {"dspark_trt_plugins", "dspark_trt_model_repo"}
    assert {name for name in beside if not (REPOSITORY / name).is_dir()} == set()
    assert {f"plugins/{name}" for name in packages("plugins")} <= beside


def test_tests_mirror_the_rooms() -> None:
    """Below each kind of tests stand folders of rooms only, and each folder of the package has its unit tests."""
    beside = {"plugins", "perf", "recipe"}  # `recipe` is that of the demonstration drafter
    rooms = {room.strip("/") for room in listed(INSIDE)}
    for kind in ("unit", "property"):
        found = {
            path.parent.relative_to(REPOSITORY / "tests" / kind)
            for path in (REPOSITORY / "tests" / kind).rglob("test_*.py")
        }
        assert {str(folder) for folder in found} - {"."} - beside <= rooms
    tested = {path.name for path in (REPOSITORY / "tests" / "unit").iterdir() if path.is_dir()}
    assert {room.rstrip("/") for room in packages("dspark_trt") if room.count("/") == 1} <= tested


def test_lines_stand_in_the_order_of_the_import_contract() -> None:
    places = {name.strip("()"): place for place, layer in enumerate(layers()) for name in layer}
    found = [places[room.split("/")[0]] for room in listed(INSIDE)]
    assert found == sorted(found)


def test_picture_has_every_room_that_data_flows_through() -> None:
    drawn = set(re.findall(r"\b\w+\b", PICTURE))
    told = {room.split("/")[0] for room in listed(INSIDE)}
    everywhere = {"errors", "log", "files"}
    assert told - everywhere - drawn == set()
    assert {"plugins", "triton_model_repo"} <= drawn
