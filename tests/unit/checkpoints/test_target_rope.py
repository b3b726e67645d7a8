"""Rotary embeddings of a target's configuration: both spellings, every scaling, how far they reach, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.checkpoints.rope import yarn_mscale
from dspark_trt.checkpoints.spec import RopeSpec
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.factories import write_target

YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize("style", ["parameters", "scaling"])
@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e5}, RopeSpec(1e5)),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, RopeSpec(1e4, "linear", factor=2.0)),
        (
            LLAMA3,
            RopeSpec(
                5e5,
                "llama3",
                factor=8.0,
                original_max_position_embeddings=256,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
        ),
        (
            YARN,
            RopeSpec(
                5e5,
                "yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                beta_fast=32.0,
                beta_slow=1.0,
                attention_factor=yarn_mscale(4.0),
            ),
        ),
    ],
    ids=["default", "linear", "llama3", "yarn"],
)
def test_rope_of_both_transformers_versions(tmp_path: Path, rope: dict, style: str, expected: RopeSpec) -> None:
    folder = write_target(tmp_path, rope=rope, rope_style=style)
    assert read_target(str(folder)).spec.decoder.rope == expected


@pytest.mark.parametrize(
    "extra",
    [{}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"attention_factor": 1.25}, {"beta_fast": 16, "beta_slow": 2}],
    ids=["plain", "mscale", "attention_factor", "betas"],
)
def test_yarn_attention_factor_is_that_of_transformers(tmp_path: Path, extra: dict) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    folder = write_target(tmp_path, rope=YARN | extra)
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(folder), "cpu")
    assert read_target(str(folder)).spec.decoder.rope.attention_factor == pytest.approx(expected, rel=1e-12)


def test_rope_type_under_its_older_name_type(tmp_path: Path) -> None:
    extra = {"rope_parameters": None, "rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    rope = read_target(str(write_target(tmp_path, config_extra=extra))).spec.decoder.rope
    assert rope == RopeSpec(1e5, "linear", factor=4.0)


def test_original_length_of_scaled_rope_defaults_to_max_position_embeddings(tmp_path: Path) -> None:
    rope = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    assert read_target(str(write_target(tmp_path, rope=rope))).spec.decoder.rope.original_max_position_embeddings == 512


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "'dynamic' is not implemented"),
        ({"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0]}, "long_factor"),
        ({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "needs factor"),
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e4}}, "full_attention"),
    ],
)
def test_rope_that_is_not_implemented_is_refused_by_name(tmp_path: Path, rope: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_target(str(write_target(tmp_path, rope=rope)))


def test_contradicting_rope_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rope_theta is 500\.0 at the top level, but 10000\.0"):
        read_target(str(write_target(tmp_path, config_extra={"rope_theta": 500.0})))


@pytest.mark.parametrize(
    ("original", "factor", "max_positions", "expected"),
    [(128, 4.0, 160, 512), (128, 4.0, 512, 512), (128, 4.0, 1024, 1024), (128, 2.5, 100, 320), (None, 4.0, 160, 640)],
)
def test_yarn_reaches_its_factor_times_the_original_positions(
    tmp_path: Path, original: int | None, factor: float, max_positions: int, expected: int
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor, "original_max_position_embeddings": original}
    folder = write_target(tmp_path, rope=rope, max_positions=max_positions)
    assert read_target(str(folder)).spec.decoder.max_position_embeddings == expected


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_other_scalings_reach_what_the_configuration_says(tmp_path: Path, factor: float) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}
    assert read_target(str(write_target(tmp_path, rope=rope))).spec.decoder.max_position_embeddings == 512


@pytest.mark.parametrize("original", [128, 128.0])
def test_positions_written_as_floats_are_whole_numbers(tmp_path: Path, original: float) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": original}
    rope_spec = read_target(str(write_target(tmp_path, rope=rope))).spec.decoder.rope
    assert rope_spec.original_max_position_embeddings == 128
    broken = write_target(tmp_path, rope=rope | {"original_max_position_embeddings": 128.5})
    with pytest.raises(CheckpointError, match=r"original_max_position_embeddings.*found 128\.5"):
        read_target(str(broken))
