"""Prompts that come with the package (Apache-2.0), for calibration and for choosing the drafter's form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dspark_trt.errors import RecipeError

Split = Literal["fit", "held_out"]


class Prompt(BaseModel):
    """One line of a prompt file. Lines without `split` are divided: every fourth is held out."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: str
    kind: str = "other"
    split: Split | None = None


def packaged_prompts() -> list[Prompt]:
    """Chat, code and maths, 40 each; every fourth is held out."""
    return _parse(files(__package__).joinpath("prompts.jsonl").read_text("utf-8").split("\n"), "the packaged prompts")


def read_prompts(path: Path) -> list[Prompt]:
    """JSON lines with the key `prompt`. Raises RecipeError that names the line."""
    try:
        lines = path.read_text("utf-8").split("\n")  # other separators may stand inside a JSON string
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"prompts {path} cannot be read ({error}); give a file of JSON lines") from None
    prompts = _parse(lines, str(path))
    if not prompts:
        raise RecipeError(f'prompts {path}: expected JSON lines such as {{"prompt": "..."}}, found none')
    return prompts


def _parse(lines: Sequence[str], where: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = Prompt.model_validate(json.loads(line))
        except (ValueError, RecursionError) as error:  # a ValidationError is a ValueError
            raise RecipeError(f'{where}, line {number}: {error}; expected {{"prompt": "..."}}') from None
        split: Split = prompt.split or ("held_out" if len(prompts) % 4 == 3 else "fit")
        prompts.append(prompt.model_copy(update={"split": split}))
    return prompts
