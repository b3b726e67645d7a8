"""The checkpoints of a build: what they say, the tokenizer, and which files decide it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark_trt.building.context import Context
from dspark_trt.building.trial import try_text
from dspark_trt.checkpoints.checks import check_finite
from dspark_trt.checkpoints.locate import locate, source_files
from dspark_trt.checkpoints.spec_json import spec_to_json
from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.log import Progress

# DeepSpec's drafters were trained on answers without thinking; `--chat-template-kwargs` wins
DEFAULT_TEMPLATE_KWARGS: dict[str, dict[str, Any]] = {
    "qwen3": {"enable_thinking": False},
    "qwen3_moe": {"enable_thinking": False},
    "gemma4": {"enable_thinking": False},
}


def checkpoint_inputs(context: Context) -> list[Path]:
    recipe = context.recipe
    files = list(source_files(locate(recipe.target, recipe.target_revision)))
    if recipe.has_drafter_model:
        files += source_files(locate(recipe.drafter, recipe.drafter_revision))
    return files


def checkpoint_settings(context: Context) -> dict[str, Any]:
    """What no input file says."""
    settings: dict[str, Any] = {"chat_template_kwargs": context.recipe.chat_template_kwargs}
    if context.recipe.has_drafter_model:
        settings["num_drafts"] = context.recipe.num_drafts
    else:
        settings |= {"drafter": context.recipe.without_model, "lookup_drafts": context.recipe.lookup_drafts}
    return settings


def make_checkpoints(context: Context, folder: Path, progress: Progress) -> None:
    recipe = context.recipe
    for name, spec in (("target", context.target.spec), ("drafter", context.draft_source)):
        (folder / f"{name}.json").write_text(json.dumps(spec_to_json(spec), indent=1) + "\n")
    progress(0.3)
    check_finite(context.target.weights, recipe.target)
    if context.drafter is not None:
        check_finite(context.drafter.weights, recipe.drafter)
    progress(0.7)
    write_tokenizer(
        recipe.target,
        folder / "tokenizer",
        revision=recipe.target_revision,
        chat_template_kwargs=DEFAULT_TEMPLATE_KWARGS.get(context.target.spec.family, {}) | recipe.chat_template_kwargs,
    )
    try_text(folder / "tokenizer", recipe.target)
