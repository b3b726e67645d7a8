"""EAGLE-3 checkpoints are read as each trainer's code means them, and what is ambiguous is refused by the key that
decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_trt.checkpoints.drafter import read_drafter, read_drafter_spec
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import Eagle3Spec, TargetCheckpoint
from dspark_trt.checkpoints.spec_json import drafter_spec_from_json, spec_to_json
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.drafter_dialects import DRAFT_IDS
from tests.support.eagle3_dialects import write_eagle3
from tests.support.factories import write_target

# (dialect, how it is written, what it means: gamma, taps, whether the last is normed, q/k norm)
FACTS: dict[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "deepspec": ("deepspec", {"layer_ids": (0, 1, 2, 4, 7)}, (7, (0, 1, 2, 4, 7), True, True)),
    "community": ("community", {"layer_ids": (0, 3, 5)}, (7, (0, 3, 5), False, False)),
    "community, default layers": ("community", {"layer_ids": None}, (7, (1, 3, 4), False, False)),
    "community, ttt_length": ("community", {"extra": {"ttt_length": 4}}, (4, (0, 1, 3), False, False)),
    "angelslim": (
        "community",
        {"extra": {"architectures": ["Eagle3LlamaForCausalLM"]}, "draft_ids": DRAFT_IDS},
        (7, (0, 1, 3), False, False),
    ),
    "first release": (
        "community",
        {"extra": {"architectures": ["LlamaForCausalLM"]}, "draft_ids": DRAFT_IDS, "layer_ids": None},
        (7, (1, 3, 4), False, False),
    ),
    "DART": ("dart", {"layer_ids": None}, (5, (1, 3, 4), False, False)),
    "DART, fewer ids": ("dart", {"layer_ids": None, "draft_ids": DRAFT_IDS}, (5, (1, 3, 4), False, False)),
    "speculators": ("speculators", {"layer_ids": (0, 4, 8)}, (3, (-1, 3, 7), False, True)),
    "speculators, default layers": ("speculators", {"layer_ids": None}, (3, (1, 3, 4), False, True)),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), family="qwen3", layers=8)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetCheckpoint:
    return read_target(str(target_folder))


@pytest.mark.parametrize("case", FACTS)
def test_a_form_means_what_its_trainer_does(
    case: str, tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    dialect, options, meaning = FACTS[case]
    folder = write_eagle3(tmp_path, target_folder, dialect, **options)
    drafter = read_drafter(str(folder), target)
    check_pairing(target, drafter)
    spec = drafter.spec
    assert isinstance(spec, Eagle3Spec)
    assert (spec.gamma, spec.target_layer_ids, spec.is_last_tap_normed, spec.decoder.has_qk_norm) == meaning
    assert spec.is_residual_normed == (dialect == "speculators")
    assert (spec.has_own_embedding, spec.has_own_head) == (dialect != "dart", True)  # DART's code takes the target's
    assert spec.is_masked == (dialect == "dart")
    if "draft_ids" in options:
        assert spec.draft_vocab_size == len(DRAFT_IDS)
        np.testing.assert_array_equal(drafter.draft_ids, DRAFT_IDS)
    without_weights = read_drafter_spec(str(folder), target.spec)
    assert (without_weights.gamma, without_weights.target_layer_ids) == meaning[:2]
    assert drafter_spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_the_option_says_how_many_are_drafted(tmp_path: Path, target_folder: Path, target: TargetCheckpoint) -> None:
    folder = write_eagle3(tmp_path, target_folder, "deepspec")
    assert read_drafter(str(folder), target, num_drafts=4).spec.gamma == 4
    assert read_drafter_spec(str(folder), target.spec, num_drafts=4).gamma == 4


def test_short_training_texts_do_not_bound_the_requests(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    """Where rotation is scaled the reach is the configuration's."""
    for rope, reach in (({}, 512), ({"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, 64)):
        extra = {"max_position_embeddings": 64}
        folder = write_eagle3(tmp_path / str(reach), target_folder, "community", extra=extra, **rope)
        assert read_drafter(str(folder), target).spec.decoder.max_position_embeddings == reach


def test_what_equals_the_target_is_the_targets(tmp_path: Path, target_folder: Path, target: TargetCheckpoint) -> None:
    folder = write_eagle3(tmp_path, target_folder, "deepspec", embed_head="equal")
    spec = read_drafter(str(folder), target).spec
    assert (spec.has_own_embedding, spec.has_own_head) == (False, False)


def test_more_drafts_than_dart_was_trained_for_are_refused(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    folder = write_eagle3(tmp_path, target_folder, "dart", layer_ids=None)
    assert read_drafter(str(folder), target, num_drafts=2).spec.gamma == 2
    with pytest.raises(CheckpointError, match=r"num_drafts: 6 drafts of a DART drafter that was trained for 5"):
        read_drafter(str(folder), target, num_drafts=6)


@pytest.mark.parametrize("tap_norm", ["each", "joint"])
def test_norms_of_taps_are_read(tap_norm: str, tmp_path: Path, target_folder: Path, target: TargetCheckpoint) -> None:
    folder = write_eagle3(tmp_path, target_folder, "speculators", tap_norm=tap_norm, extra={"norm_output": True})
    spec = read_drafter(str(folder), target).spec
    assert isinstance(spec, Eagle3Spec)
    assert (spec.tap_norm, spec.is_output_normed) == (tap_norm, True)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no layers": ("deepspec", {"target_layer_ids": None}, r"target_layer_ids.*no default is right"),
    "unordered layers": ("deepspec", {"target_layer_ids": [3, 0, 1]}, r"not strictly increasing"),
    "no stated residual": ("speculators", {"norm_before_residual": None}, r"norm_before_residual: expected true"),
    "output norm": ("community", {"norm_output": True}, r"norm_output = True: to SpecForge"),
    "head without norm": ("community", {"norm_output": False}, r"norm_output = False: to SpecForge"),
    "ids at the top": (
        "community",
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        r"eagle_aux_hidden_state_layer_ids at the top level: speculators' loaders count what goes into",
    ),
    "EAGLE-1": ("community", {"eagle_config": {"use_aux_hidden_state": False}}, r"use_aux_hidden_state.*EAGLE-1"),
    "two layers": ("community", {"num_hidden_layers": 2}, r"num_hidden_layers = 2"),
    "wider target": ("community", {"target_hidden_size": 64}, r"target_hidden_size = 64 is not hidden_size = 32"),
    "both norms": ("speculators", {"fc_norm": True, "norm_before_fc": True}, r"exclude each other"),
    "other layer": ("speculators", {"transformer_layer_config": {"model_type": "gpt_oss"}}, r"model_type.*'gpt_oss'"),
    "window": ("deepspec", {"layer_types": ["sliding_attention"]}, r"sliding window is not implemented"),
    "no drafts": ("deepspec", {"ttt_length": 0}, r"ttt_length"),
    "DART without masks": ("dart", {"draft_length": None}, r"draft_length: expected the number of masks .* found None"),
    "DART of odd masks": ("dart", {"draft_length": True}, r"draft_length: expected .* found True"),
    "P-EAGLE": ("speculators", {"speculators_model_type": "peagle"}, r"P-EAGLE.*not supported"),
    "EAGLE-1 of speculators": ("speculators", {"speculators_model_type": "eagle"}, r"EAGLE-1 or 2.*not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_ambiguous_or_unknown_is_refused_by_its_key(
    case: str, tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    dialect, extra, message = REFUSED[case]
    folder = write_eagle3(tmp_path, target_folder, dialect, extra=extra)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(str(folder), target)
    with pytest.raises(CheckpointError, match=message):
        read_drafter_spec(str(folder), target.spec)


def test_a_tensor_too_many_or_too_few_is_named(tmp_path: Path, target_folder: Path, target: TargetCheckpoint) -> None:
    folder = write_eagle3(tmp_path, target_folder, "community", draft_ids=DRAFT_IDS)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for change, message in (
        ({"fc_norm.0.weight": np.ones(32, np.float32)}, r"tensor fc_norm\.0\.weight.*is not expected"),
        ({"midlayer.hidden_norm.weight": None}, r"tensor layers\.0\.hidden_norm\.weight is missing"),
        ({"d2t": None, "t2d": None}, r"tensor d2t is missing"),
        ({"lm_head.weight": None}, r"tensor lm_head\.weight is missing"),
    ):
        changed = {name: each for name, each in {**tensors, **change}.items() if each is not None}
        save_file(changed, path)
        with pytest.raises(CheckpointError, match=message):
            read_drafter(str(folder), target)


def test_odd_values_of_any_key_end_in_one_message(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    from dspark_trt.checkpoints.drafters.eagle3 import describe_eagle3, is_eagle3
    from tests.unit.checkpoints.test_drafter_dialects import changes_of

    num_refused = 0
    for dialect in ("deepspec", "community", "speculators"):
        folder = write_eagle3(tmp_path / dialect, target_folder, dialect)
        config = json.loads((folder / "config.json").read_text())
        more = ("fc_norm", "norm_before_fc", "norm_output", "eagle_config", "target_hidden_size")
        for change in changes_of(config | {key: config.get(key) for key in more}):
            if not is_eagle3(change):
                continue
            try:
                spec_to_json(describe_eagle3(change, "config.json", target.spec, None).spec)
            except CheckpointError:
                num_refused += 1
    assert num_refused > 300
