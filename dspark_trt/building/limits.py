"""Limits that a recipe and a drafter put on each other, checked without a weight or an engine."""

from __future__ import annotations

from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.calibration.given import read_given
from dspark_trt.checkpoints.spec import DrafterSpec
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.errors import RecipeError


def check_recipe(recipe: BuildRecipe) -> None:
    """What a recipe says by itself. Raises RecipeError."""
    if recipe.max_batch_tokens < recipe.max_slots:
        raise RecipeError(
            f"max_batch_tokens {recipe.max_batch_tokens} is below max_slots {recipe.max_slots}: a step could not "
            f"hold one "
            "token of every request; raise --max-batch-tokens or lower --max-slots"
        )


def check_calibration(recipe: BuildRecipe, drafter: DrafterSpec) -> None:
    """Raises RecipeError when the calibration file of the recipe cannot be read or belongs to another drafter."""
    if recipe.calibration is not None:
        read_given(recipe.calibration, drafter.gamma)


def check_scheduler(recipe: BuildRecipe, drafter: DrafterSpec) -> None:
    """Raises RecipeError when the scheduler of the build asks for more drafts than there are."""
    if recipe.scheduler.startswith("fixed:"):
        check_fixed(parse_scheduler(recipe.scheduler).verify_len, drafter.gamma, "scheduler")


def check_fixed(verify_len: int | None, gamma: int, where: str) -> None:
    """Raises RecipeError when more drafts are to be verified than a block has."""
    if verify_len is not None and verify_len > gamma:
        raise RecipeError(
            f"{where}: fixed:{verify_len} verifies more drafts than a block has, {gamma}; give fixed:{gamma} or less"
        )
