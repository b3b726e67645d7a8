"""Limits that a recipe and a drafter put on each other, checked without a weight or an engine."""

from __future__ import annotations

from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.calibration.given import read_given
from dspark_trt.checkpoints.spec import DrafterSpec, DraftSource, NgramSpec, a_drafter
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.errors import RecipeError

_OF_A_MODEL = ("drafter_revision", "num_drafts", "draft_vocab", "drafter_precision", "markov_top_n", "lookup")
_OF_LOOKUPS_ALONE = ("lookup_drafts",)


def check_recipe(recipe: BuildRecipe) -> None:
    """What a recipe says by itself. Raises RecipeError."""
    if recipe.max_batch_tokens < recipe.max_requests:
        raise RecipeError(
            f"max_batch_tokens {recipe.max_batch_tokens} is below max_requests {recipe.max_requests}: a step could not "
            f"hold one "
            "token of every request; raise --max-batch-tokens or lower --max-requests"
        )
    _check_drafter_options(recipe)


def _check_drafter_options(recipe: BuildRecipe) -> None:
    """Raises RecipeError for an option that means nothing to what drafts."""
    names: tuple[str, ...] = _OF_LOOKUPS_ALONE
    why = "is for drafter ngram or lookahead: beside a model, as many drafts are copied as its blocks have"
    if not recipe.has_drafter_model:
        names = _OF_A_MODEL
        why = f"means nothing to drafter {recipe.without_model}, which has no model and looks every draft up"
    for name in names:
        value = getattr(recipe, name)
        if value != BuildRecipe.model_fields[name].default:
            raise RecipeError(f"{name}: {value} {why}; leave --{name.replace('_', '-')} out")


def check_family(recipe: BuildRecipe, drafter: DrafterSpec) -> None:
    """Raises RecipeError for what the drafter's family cannot do. `recipe` is resolved."""
    name = a_drafter(drafter.kind)
    if recipe.num_drafts is not None and drafter.kind == "block":
        raise RecipeError(
            f"num_drafts: {recipe.num_drafts} means nothing to {name}, whose block has {drafter.gamma} drafts as it "
            "was trained; leave --num-drafts out"
        )


def check_calibration(recipe: BuildRecipe, drafter: DraftSource) -> None:
    """Raises RecipeError when the calibration file of the recipe cannot be read or belongs to another drafter."""
    if recipe.calibration is not None:
        read_given(recipe.calibration, drafter.gamma, is_of_lookups=isinstance(drafter, NgramSpec))


def check_scheduler(recipe: BuildRecipe, drafter: DraftSource) -> None:
    """Raises RecipeError when the scheduler of the build asks for more drafts than there are."""
    if recipe.scheduler.startswith("fixed:"):
        check_fixed(parse_scheduler(recipe.scheduler).verify_len, drafter.gamma, "scheduler")


def check_fixed(verify_len: int | None, gamma: int, where: str) -> None:
    """Raises RecipeError when more drafts are to be verified than a block has."""
    if verify_len is not None and verify_len > gamma:
        raise RecipeError(
            f"{where}: fixed:{verify_len} verifies more drafts than a block has, {gamma}; give fixed:{gamma} or less"
        )
