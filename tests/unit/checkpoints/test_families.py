"""What each family's configuration means: which layers have a window, which Linear layers a bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dspark_trt.checkpoints.families import FAMILIES, FULL, SLIDING, layer_windows
from dspark_trt.checkpoints.spec import Family
from dspark_trt.checkpoints.target import read_target_spec
from dspark_trt.errors import CheckpointError
from tests.support.transformers_targets import write_by_transformers

MIXED = [SLIDING, FULL, SLIDING, FULL]
WINDOWS: list[tuple[Family, dict[str, Any], tuple[int | None, ...]]] = [
    ("llama", {}, ()),
    ("llama", {"sliding_window": 64}, ()),
    ("llama", {"layer_types": [FULL] * 4, "sliding_window": 64}, ()),
    ("llama", {"layer_types": MIXED, "sliding_window": 64}, (64, None, 64, None)),
    ("qwen2", {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 2}, ()),
    ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, ()),
    ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 64)),
    ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, ()),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
    ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, ()),
    ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": MIXED}, (8, None, 8, None)),
    ("mistral", {}, (4096,) * 4),
    ("mistral", {"sliding_window": None}, ()),
    ("mistral", {"sliding_window": 9}, (9,) * 4),
    ("mistral", {"sliding_window": 9, "layer_types": [SLIDING] * 4}, (9,) * 4),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}, (9,) * 4),
    ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 9}, ()),
    ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 0, "layer_types": [FULL] * 4}, ()),
    ("mixtral", {}, ()),
    ("mixtral", {"sliding_window": 9}, (9,) * 4),
    ("ministral", {"sliding_window": 9, "layer_types": MIXED}, (9, None, 9, None)),
]


@pytest.mark.parametrize(("family", "values", "expected"), WINDOWS)
def test_windows_of_layers(family: Family, values: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert layer_windows(values, family, 4, "config.json") == expected


@pytest.mark.parametrize(("family", "values", "expected"), [each for each in WINDOWS if each[0] in ("qwen2", "qwen3")])
def test_windows_are_those_of_transformers(family: str, values: dict[str, Any], expected: Any) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=4, **values)
    found = [config.sliding_window if each == SLIDING else None for each in config.layer_types]
    assert found == list(expected or [None] * 4)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("llama", {"use_sliding_window": True, "sliding_window": 64}, "does not say which layers"),
        ("llama", {"layer_types": MIXED}, "sliding_window has to be a number .*found None"),
        ("llama", {"layer_types": MIXED, "sliding_window": 8, "use_sliding_window": False}, "is not true"),
        ("qwen3", {"layer_types": MIXED, "sliding_window": 8}, "is not true"),
        (
            "qwen2",
            {"layer_types": [FULL, "chunked_attention"] * 2},
            r"\['chunked_attention'\], which is not implemented",
        ),
        ("qwen2", {"layer_types": [FULL] * 3}, "one entry for each of the 4 layers .*found 3 entries"),
        ("qwen2", {"layer_types": "all"}, "found 'all'"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8}, "does not say which layers"),
        ("mistral", {"sliding_window": 0}, "has to be a number .*found 0"),
        ("mistral", {"sliding_window": True}, "found True"),
        ("mistral", {"sliding_window": 9, "layer_types": MIXED}, "layer_types are not what sliding_window = 9 says"),
        ("mistral", {"sliding_window": None, "layer_types": [SLIDING] * 4}, "are not what sliding_window = None"),
        ("qwen3_moe", {"sliding_window": 9, "layer_types": MIXED}, "are not what sliding_window = 9 says"),
    ],
)
def test_windows_that_are_left_open_or_contradict_each_other_are_refused(
    family: Family, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        layer_windows(values, family, 4, "config.json")


@pytest.mark.parametrize(
    ("family", "more", "has_qkv_bias"),
    [("qwen2", {}, True), ("mistral", {"attention_bias": True, "mlp_bias": True}, False)],
)
def test_biases_are_those_of_the_family_whatever_other_families_call_them(
    tmp_path: Path, family: str, more: dict[str, Any], has_qkv_bias: bool
) -> None:
    decoder = read_target_spec(str(write_by_transformers(tmp_path, family, **more))).decoder
    assert (decoder.has_qkv_bias, decoder.has_o_bias, decoder.has_mlp_bias) == (has_qkv_bias, False, False)


def test_every_family_has_its_architecture_from_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    of_checkpoints = {"mimo"}  # whose code comes with them
    for family, facts in FAMILIES.items():
        if family in of_checkpoints:
            assert family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            continue
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] == facts.architecture
