"""The estimates in the plugins' README are those that the script makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from step_floor import GAMMA, LAYER_WEIGHTS, TARGET_LAYERS, table, terms

README = Path(__file__).parents[3] / "plugins" / "README.md"


def test_the_table_in_the_readme_is_that_of_the_script() -> None:
    assert "\n".join(table()) in README.read_text()


def test_terms_are_those_of_the_shapes() -> None:
    layers = terms(1)[0]
    assert layers.num_bytes == pytest.approx(13.9e9, rel=0.01)  # 6.9e9 parameters, two bytes
    assert layers.flop == 2 * (GAMMA + 1) * TARGET_LAYERS * LAYER_WEIGHTS
    assert [term.floor_ms for term in terms(32)] >= [term.floor_ms for term in terms(1)]
