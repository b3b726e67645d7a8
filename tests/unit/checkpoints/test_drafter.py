"""Drafters in every DeepSpec form, the contradictions that are refused,
and the other formats that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.spec_json import drafter_spec_from_json, spec_to_json
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.factories import write_drafter, write_target

FORMS = {
    "vanilla": {},
    "gated": {"head_type": "gated"},
    "rnn": {"head_type": "rnn"},
    "no_head": {"markov_rank": 0, "confidence": False},
    "no_head_with_confidence": {"markov_rank": 0},
    "no_confidence": {"confidence": False},
    "confidence_without_bias": {"confidence_bias": False},
    "confidence_without_markov": {"confidence_with_markov": False},
    "bfloat16_rnn_shards": {"head_type": "rnn", "dtype": "bfloat16", "shards": 2},
    "float16_gated": {"head_type": "gated", "dtype": "float16"},
    "own_heads": {"heads": 8, "kv_heads": 4, "head_dim": 16},
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetCheckpoint:
    return read_target(str(target_folder))


def edit_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    """Replace tensors of a written drafter; None removes one. `__` stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_with_all_its_tensors(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint, form: str
) -> None:
    options = FORMS[form]
    folder = write_drafter(tmp_path, target_folder, **options)
    drafter = read_drafter(str(folder), target)
    check_pairing(target, drafter)
    stored: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    assert set(drafter.weights.names()) == set(stored)
    for name, tensor in stored.items():
        np.testing.assert_array_equal(drafter.weights.array(name), tensor)
    spec = drafter.spec
    assert (spec.gamma, spec.mask_token_id, spec.target_layer_ids) == (5, 96, (0, 2))
    assert spec.markov_rank == options.get("markov_rank", 8)
    assert spec.markov_head_type == options.get("head_type", "vanilla")
    assert spec.has_confidence_head == options.get("confidence", True)
    assert spec.has_confidence_bias == (spec.has_confidence_head and options.get("confidence_bias", True))
    expected_markov = spec.has_confidence_head and spec.markov_rank > 0 and options.get("confidence_with_markov", True)
    assert spec.is_confidence_with_markov == expected_markov
    assert not spec.has_own_embedding
    assert not spec.has_own_head
    assert drafter_spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@pytest.mark.parametrize("is_target_tied", [True, False])
@pytest.mark.parametrize(("embed_head", "is_own"), [("absent", False), ("equal", False), ("different", True)])
def test_embedding_and_head_are_its_own_only_where_they_differ(
    tmp_path: Path, is_target_tied: bool, embed_head: str, is_own: bool
) -> None:
    target_folder = write_target(tmp_path / "target", tied=is_target_tied, dtype="bfloat16")
    folder = write_drafter(tmp_path / "drafter", target_folder, embed_head=embed_head, dtype="bfloat16")
    drafter = read_drafter(str(folder), read_target(str(target_folder)))
    assert drafter.spec.has_own_embedding == drafter.spec.has_own_head == is_own
    assert ("embed_tokens.weight" in drafter.weights.names()) == is_own
    assert ("lm_head.weight" in drafter.weights.names()) == is_own


def test_one_changed_element_makes_the_head_its_own(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    folder = write_drafter(tmp_path, target_folder, embed_head="equal")
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    head[-1, -1] += 1
    edit_tensors(folder, lm_head__weight=head)
    spec = read_drafter(str(folder), target).spec
    assert (spec.has_own_embedding, spec.has_own_head) == (False, True)


@pytest.mark.parametrize("taps", [(-1, 3), (0, 1, 2, 3)], ids=["embedding_and_last_layer", "all_layers"])
def test_embedding_and_last_layer_can_be_tapped(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint, taps: tuple[int, ...]
) -> None:
    drafter = read_drafter(str(write_drafter(tmp_path, target_folder, taps=taps)), target)
    check_pairing(target, drafter)
    assert drafter.spec.target_layer_ids == taps


def test_copied_tie_word_embeddings_does_no_harm_without_an_embedding_in_the_file(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    folder = write_drafter(tmp_path, target_folder, config_extra={"tie_word_embeddings": True})
    spec = read_drafter(str(folder), target).spec
    assert not spec.has_own_embedding
    assert not spec.has_own_head


def test_copied_tie_word_embeddings_is_refused_where_it_leaves_the_head_open(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    folder = write_drafter(tmp_path, target_folder, embed_head="different", config_extra={"tie_word_embeddings": True})
    edit_tensors(folder, lm_head__weight=None)
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true"):
        read_drafter(str(folder), target)


def test_confidence_width_decides_where_the_key_is_absent(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    for with_markov in (True, False):
        folder = write_drafter(
            tmp_path / str(with_markov),
            target_folder,
            confidence_with_markov=with_markov,
            config_extra={"confidence_head_with_markov": None},
        )
        assert read_drafter(str(folder), target).spec.is_confidence_with_markov == with_markov


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config_extra": {"target_layer_ids": None}}, "target_layer_ids is missing.*training configuration"),
        ({"config_extra": {"target_layer_ids": []}}, "target_layer_ids"),
        ({"config_extra": {"target_layer_ids": [2, 0]}}, "not strictly increasing"),
        ({"config_extra": {"target_layer_ids": [1, 1]}}, "not strictly increasing"),
        ({"config_extra": {"block_size": None}}, "block_size is missing"),
        ({"config_extra": {"mask_token_id": None}}, "mask_token_id is missing"),
        ({"config_extra": {"markov_rank": 0}}, r"markov_rank \(0\) says that there is no head"),
        ({"config_extra": {"markov_rank": None}}, r"markov_rank \(None\) says that there is no head"),
        ({"markov_rank": 0, "config_extra": {"markov_rank": 8}}, r"markov_rank \(8\) says that there is a head"),
        ({"config_extra": {"markov_head_type": "gated"}}, "'gated', but the tensors are those of a 'vanilla' head"),
        ({"head_type": "rnn", "config_extra": {"markov_head_type": "vanilla"}}, "those of a 'rnn' head"),
        ({"config_extra": {"markov_head_type": "lstm"}}, "markov_head_type"),
        ({"config_extra": {"enable_confidence_head": False}}, "enable_confidence_head says that there is no head"),
        ({"confidence": False, "config_extra": {"enable_confidence_head": True}}, "there is a head, but confidence"),
        (
            {"config_extra": {"confidence_head_with_markov": False}},
            r"confidence_head.proj.weight has shape \[1, 40\], expected \[1, 32\]",
        ),
        (
            {"markov_rank": 0, "config_extra": {"confidence_head_with_markov": True}},
            "no Markov embedding to read",
        ),
        (
            {"config_extra": {"target_layer_ids": [0, 1, 2]}},
            r"fc.weight has shape \[32, 64\], expected \[32, 96\]",
        ),
        (
            {"config_extra": {"markov_rank": 4}},
            r"markov_w1.weight has shape \[97, 8\], expected \[97, 4\]",
        ),
    ],
)
def test_contradictions_are_refused_with_both_sides(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint, options: dict, message: str
) -> None:
    folder = write_drafter(tmp_path, target_folder, **options)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(str(folder), target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers__0__mlp__w1__weight": np.ones((2, 2), np.float32)}, r"layers\.0\.mlp\.w1\.weight .*is not expected"),
        ({"d2t": np.arange(4)}, "draft_vocab_size = 97, but d2t has 4 ids"),
        ({"markov_head__markov_w2__weight": None}, r"markov_w2\.weight is missing"),
        (
            {"markov_head__markov_w2__weight": np.ones((97 + 64, 8), np.float32)},
            r"markov_w2\.weight has shape \[161, 8\], expected \[97, 8\]",
        ),
        ({"norm__weight": np.ones(32, np.int64)}, "norm.weight has element type I64"),
    ],
    ids=["name_like_markov_w1", "reduced_vocabulary", "missing", "padded_vocabulary", "integers"],
)
def test_every_tensor_is_consumed_exactly_once(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint, changes: dict, message: str
) -> None:
    folder = write_drafter(tmp_path, target_folder)
    edit_tensors(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(str(folder), target)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"draft_vocab_size": 50}, "draft_vocab_size = 50"),
        ({"runtime_block_size": 3}, "runtime_block_size = 3"),
        ({"is_causal": True}, "is_causal = True"),
        ({"use_swa": True}, "use_swa"),
        ({"swa_window_size": 2048}, "swa_window_size"),
        ({"attention_sink_bias": True}, "attention_sink_bias"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
    ],
)
def test_attention_variants_are_refused_by_name(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint, extra: dict, message: str
) -> None:
    folder = write_drafter(tmp_path, target_folder, config_extra=extra)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(str(folder), target)


def test_demonstration_drafter_is_read(demo_drafter_path: Path, tmp_path: Path) -> None:
    target = read_target(str(write_target(tmp_path)))
    drafter: DrafterCheckpoint = read_drafter(str(demo_drafter_path), target)
    spec = drafter.spec
    assert (spec.gamma, spec.mask_token_id, spec.markov_rank, spec.num_target_layers) == (7, 16, 64, 30)
    assert spec.target_layer_ids == (1, 8, 15, 22, 27)
    assert spec.has_confidence_bias
    assert spec.is_confidence_with_markov


def test_equal_embedding_of_another_element_type_is_still_equal(tmp_path: Path) -> None:
    target_folder = write_target(tmp_path / "target", dtype="bfloat16")
    folder = write_drafter(tmp_path / "drafter", target_folder, embed_head="equal", dtype="float32")
    spec = read_drafter(str(folder), read_target(str(target_folder))).spec
    assert not spec.has_own_embedding
    assert not spec.has_own_head
