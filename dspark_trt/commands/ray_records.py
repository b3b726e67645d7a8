"""What a cluster found, kept in a file line by line as it comes: the same command again goes on where it ended.

A line of the file has the number of the line that it answers, and a hash of what it was made of: build, options and
text. So nothing that was found on another build, or with other options, is ever taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dspark_trt.building.manifest import hash_key
from dspark_trt.commands.ray_workers import Decode
from dspark_trt.errors import RecipeError
from dspark_trt.files import write_atomically

OPTION = "--records"


def recorded(
    path: Path | None, made_of: Any, lines: Sequence[tuple[int, str]], decode: Decode
) -> Iterator[dict[str, Any]]:
    """One result for each of the lines: those that the file has, then the others, which it is given as they come.

    Args:
        path: None: nothing is kept.
        made_of: everything but a line's text that its result depends on; for `hash_key`.

    Results with `error`, or with `is_whole` false, are not kept: they are made again. Raises RecipeError for a file
    that cannot be read or written, or that holds something else.
    """
    if path is None:
        yield from decode(lines)
        return
    keys = {number: hash_key(made_of, text) for number, text in lines}
    kept = _read(path, keys)
    text = "".join(_line(result, keys) for result in kept.values())
    try:
        write_atomically(path, text)  # without the torn line of an interrupted run
        stream = path.open("a", encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{OPTION} {path} cannot be written ({error.strerror}); give another file") from None
    with stream:
        yield from kept.values()
        open_lines = [(number, text) for number, text in lines if number not in kept]
        for result in decode(open_lines) if open_lines else ():
            if "error" not in result and result.get("is_whole", True):
                stream.write(_line(result, keys))
                stream.flush()
            yield result


def _line(result: dict[str, Any], keys: dict[int, str]) -> str:
    return json.dumps({**result, "made_of": keys[result["line"]]}, ensure_ascii=False) + "\n"


def _read(path: Path, keys: dict[int, str]) -> dict[int, dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n") if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{OPTION} {path} cannot be read ({error}); give another file") from None
    kept: dict[int, dict[str, Any]] = {}
    for position, line in enumerate(lines, 1):
        try:
            result = json.loads(line)
            number, made_of = int(result["line"]), result.pop("made_of")
        except (ValueError, TypeError, KeyError, RecursionError):
            if position == len(lines):  # the last line of an interrupted run
                continue
            raise RecipeError(f"{OPTION} {path}: line {position} is no record; give a new file") from None
        if keys.get(number) != made_of:
            raise RecipeError(
                f"{OPTION} {path}: line {position} was found on another build, with other prompts or other options; "
                "give a new file"
            )
        kept[number] = result
    return kept
