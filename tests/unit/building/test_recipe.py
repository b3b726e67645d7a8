"""The recipe: options win over the file, and a wrong key is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.building.build import resolve
from dspark_trt.building.recipe import BuildRecipe, load_recipe
from dspark_trt.errors import RecipeError

PAIR = {"target": "t", "drafter": "d"}


def test_options_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("target: t\ndrafter: d\nmax_requests: 8\nprecision: int8\n")
    recipe = load_recipe(path, {"max_requests": 4, "precision": None})
    assert (recipe.max_requests, recipe.precision) == (4, "int8")


@pytest.mark.parametrize("key", ["scheduler", "lookup", "cuda_graphs"])
def test_off_is_a_word_in_a_recipe_and_no_truth_value(key: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"target: t\ndrafter: d\n{key}: off\n")
    assert getattr(load_recipe(path, {}), key) == "off"


def test_a_switch_in_a_recipe_is_true_or_false(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("target: t\ndrafter: d\nprefix_cache: false\n")
    assert not load_recipe(path, {}).prefix_cache


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafter": "d"}, "target: Field required"),
        (PAIR | {"max_request": 4}, r"max_request: .*known keys: .*max_requests"),
        (PAIR | {"precision": "fp64"}, r"precision: .*'fp32', 'int8', 'int4', 'bf16' or 'fp16'.*found 'fp64'"),
        (PAIR | {"max_requests": 0}, r"max_requests: .*greater than or equal to 1.*found 0"),
        (PAIR | {"max_requests": True}, r"^max_requests: expected no truth value, found True$"),
        (PAIR | {"markov_top_n": True}, r"^markov_top_n: expected no truth value, found True$"),
        (PAIR | {"compute_capabilities": [True]}, r"^compute_capabilities: expected no truth value, found \[True\]$"),
        (
            PAIR | {"compute_capabilities": 89},
            r"^compute_capabilities: expected a list of SMs such as \[89\], found 89$",
        ),
        (PAIR | {"compute_capabilities": ["sm_89"]}, r"compute_capabilities\.0: .*valid integer.*found 'sm_89'"),
    ],
)
def test_refusals_name_the_key_and_what_was_found(values: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(None, values)


@pytest.mark.parametrize("content", ["- a\n- b\n", "target: [", "just text"])
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        load_recipe(path, PAIR)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        load_recipe(tmp_path / "none.yaml", PAIR)


def test_step_must_hold_one_token_of_every_request() -> None:
    with pytest.raises(RecipeError, match="max_batch_tokens 16 is below max_requests 32"):
        resolve(BuildRecipe(**PAIR, max_requests=32, max_batch_tokens=16))


def test_no_auto_after_resolving() -> None:
    assert resolve(BuildRecipe(**PAIR)).backend == "onnxruntime"


def test_file_that_cannot_be_read_as_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(RecipeError, match=path.name):
            load_recipe(path, PAIR)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x, x]\ntarget: *a\n", "an alias; write out"),
        ("a: &a [x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n", "an alias"),
        ("target: &a\n  - *a\n", "an alias"),
        ("target: " + "[" * 5000 + "]" * 5000, "recursion"),
        ("max_slots: " + "9" * 5000, "digits"),
        ("target: !!python/object/apply:os.system [id]", "python/object"),
    ],
)
def test_file_that_stands_for_more_than_it_holds_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """S13, S14: nine aliases of nine aliases of nine took minutes once they were printed."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=rf"recipe\.yaml is not valid YAML: (?s:.)*{message}"):
        load_recipe(path, PAIR)
