"""A language model is read as a drafter where its vocabulary is the target's, PARD's mask token with it; what does not
fit is refused by what decides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_trt.checkpoints.drafter import read_drafter, read_drafter_spec
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import LanguageModelSpec, TargetCheckpoint
from dspark_trt.checkpoints.spec_json import drafter_spec_from_json, spec_to_json
from dspark_trt.checkpoints.target import read_target
from dspark_trt.checkpoints.vocabularies import check_vocabularies
from dspark_trt.errors import CheckpointError, PairingError
from tests.support.factories import write_target
from tests.support.gguf_factory import write_gguf

SMALL: dict[str, Any] = {"hidden": 24, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 16}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetCheckpoint:
    return read_target(str(write_target(tmp_path_factory.mktemp("target"), family="qwen3")))


@pytest.mark.parametrize("vocab_size", [80, 97, 128])
@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_of_another_size_is_cut_to_the_common_ids(
    vocab_size: int, tied: bool, tmp_path: Path, target: TargetCheckpoint
) -> None:
    folder = write_target(tmp_path, **SMALL, vocab_size=vocab_size, tied=tied)
    drafter = read_drafter(str(folder), target)
    check_pairing(target, drafter)
    spec, stored = drafter.spec, load_file(folder / "model.safetensors")
    assert isinstance(spec, LanguageModelSpec)
    assert (spec.gamma, spec.num_taps, spec.decoder.vocab_size, spec.is_head_tied) == (7, 0, 97, tied)
    assert spec.draft_vocab_size == (80 if vocab_size == 80 else None)
    assert (drafter.draft_ids is None) == (vocab_size != 80)
    for name in ("embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        own = stored[name if name == "lm_head.weight" else f"model.{name}"]
        np.testing.assert_array_equal(drafter.weights.array(name), own[:97])
        assert drafter.weights.info(name).shape == (min(vocab_size, 97), 24)
    assert read_drafter_spec(str(folder), target.spec) == spec
    assert drafter_spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_gguf_file_is_a_language_model(tmp_path: Path, target: TargetCheckpoint) -> None:
    folder = write_target(tmp_path / "model", **SMALL)
    file = write_gguf(tmp_path / "model.gguf", folder)
    drafter, of_folder = read_drafter(str(file), target, num_drafts=3), read_drafter(str(folder), target, num_drafts=3)
    assert drafter.spec.gamma == 3
    assert replace(drafter.spec.decoder, rms_norm_eps=1e-6) == of_folder.spec.decoder  # a float32 in the file
    np.testing.assert_array_equal(
        drafter.weights.array("layers.1.self_attn.q_proj.weight"),
        of_folder.weights.array("layers.1.self_attn.q_proj.weight"),
    )
    assert read_drafter_spec(str(file), target.spec, num_drafts=3) == drafter.spec


def test_pards_mask_token_is_read(tmp_path: Path, target: TargetCheckpoint) -> None:
    extra = {"pard_token": 90, "spd_type": "pard"}
    folder = write_target(tmp_path, **SMALL, family="qwen3", config_extra=extra)
    spec = read_drafter(str(folder), target, num_drafts=12).spec
    assert isinstance(spec, LanguageModelSpec)
    assert (spec.gamma, spec.mask_token_id) == (12, 90)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pard_token": 97}, r"pard_token = 97, but the ids of drafter and target end at 96"),
        ({"pard_token": -1}, r"pard_token: expected the id of the mask token, found -1"),
        ({"pard_token": [90, 91]}, r"pard_token: expected the id of the mask token, found \[90, 91\]"),
        ({"pard_token": True}, r"pard_token: expected the id of the mask token, found True"),
        ({"spd_type": "pard"}, r"pard_token: expected the id of the mask token, found None"),
        ({"spd_type": "pard2", "pard_token": 90}, r"spd_type = 'pard2' is not supported.*PARD-2 reads hidden states"),
        ({"spd_type": 3}, r"spd_type = 3 is not supported"),
        ({"architectures": ["PardForCausalLM"], "pard_token": 90}, r"a PARD form that is not read \(PardForCausalLM"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not implemented"),
        ({"num_hidden_layers": 3}, r"tensor layers\.2\..* is missing"),
        ({"architectures": ["GemmaForCausalLM"]}, r"the format GemmaForCausalLM"),
    ],
)
def test_what_is_ambiguous_or_unknown_is_refused_by_its_key(
    extra: dict[str, Any], message: str, tmp_path: Path, target: TargetCheckpoint
) -> None:
    folder = write_target(tmp_path, **SMALL, config_extra=extra)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(str(folder), target)


def test_the_first_eagle_is_told_from_a_language_model(tmp_path: Path, target: TargetCheckpoint) -> None:
    folder = write_target(tmp_path, **SMALL)
    tensors = load_file(folder / "model.safetensors") | {"fc.weight": np.ones((24, 48), np.float32)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="form of EAGLE-1 or 2"):
        read_drafter(str(folder), target)


class Folders:
    """A target of 320 ids and a drafter, with tokenizers."""

    def __init__(self, root: Path, vocab_size: int = 300) -> None:
        self.target = write_target(root / "target", vocab_size=320, tokenizer=True)
        self.drafter = write_target(root / "drafter", **SMALL, vocab_size=vocab_size, tokenizer=True)

    def check(self) -> None:
        target = read_target(str(self.target))
        spec = read_drafter_spec(str(self.drafter), target.spec)
        assert isinstance(spec, LanguageModelSpec)
        check_vocabularies(str(self.target), None, str(self.drafter), None, spec)

    def edit(self, old: str, new: str) -> None:
        file = self.drafter / "tokenizer.json"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))


def test_ids_that_are_the_same_tokens_pass(tmp_path: Path) -> None:
    Folders(tmp_path).check()


def test_an_ordinary_token_of_another_id_is_refused(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    vocabulary = json.loads((folders.drafter / "tokenizer.json").read_text())["model"]["vocab"]
    first, second = vocabulary["a"], vocabulary["b"]
    folders.edit(f'"a": {first}', '"a": XX')
    folders.edit(f'"b": {second}', f'"b": {first}')
    folders.edit("XX", str(second))
    message = rf"tokenizer: id {first} is 'a' to the target and 'b' to the drafter, one of 2"
    with pytest.raises(PairingError, match=message):
        folders.check()


def test_a_special_token_of_another_name_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = Folders(tmp_path)
    folders.edit("<|im_start|>", "<|begin|>")
    folders.check()
    assert "1 special tokens differ between target and drafter" in caplog.text


def test_without_a_tokenizer_only_an_equal_vocabulary_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for size in (320, 300):
        folders = Folders(tmp_path / str(size), vocab_size=size)
        (folders.drafter / "tokenizer.json").unlink()
        if size == 320:
            folders.check()
            assert "has no tokenizer that can be read: whether" in caplog.text
        else:
            message = r"vocab_size: the target has 320, the drafter 300, and .* no tokenizer"
            with pytest.raises(PairingError, match=message):
                folders.check()


def test_tokenizers_of_a_gguf_file_and_a_folder_are_compared(tmp_path: Path) -> None:
    folders = Folders(tmp_path, vocab_size=320)
    folders.drafter = write_gguf(tmp_path / "drafter.gguf", folders.drafter)
    folders.check()
