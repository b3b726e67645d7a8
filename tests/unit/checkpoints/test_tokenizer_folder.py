"""Tokenizers of Hugging Face folders: templates, special tokens and BOS from wherever the folder keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.errors import CheckpointError
from dspark_trt.text import TextCodec
from tests.support.factories import write_target

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", vocab_size=320, tokenizer=True)


def change_config(folder: Path, **values: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def written(folder: Path) -> TextCodec:
    destination = folder.parent / "tokenizer"
    write_tokenizer(str(folder), destination)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["target", "tokenizer"]  # no scratch left
    return TextCodec.load(destination)


def test_template_file_goes_before_the_one_in_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert written(folder).render_chat(USER) == "file <|im_end|>"


def test_default_of_a_list_of_templates_is_taken(folder: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    change_config(folder, chat_template=templates)
    assert written(folder).render_chat(USER) == "plain"


def test_list_of_templates_without_default_names_what_there_is(folder: Path) -> None:
    change_config(folder, chat_template=[{"name": "tool_use", "template": "tools"}])
    with pytest.raises(CheckpointError, match=r"named \['tool_use'\], none of them 'default'.*chat_template\.jinja"):
        written(folder)


def test_folder_without_a_template_is_fine_until_a_chat_is_asked_for(folder: Path) -> None:
    change_config(folder, chat_template=None)
    assert not (folder.parent / "tokenizer" / "chat_template.jinja").exists()
    assert written(folder).encode("hi")


def test_template_with_a_syntax_error_is_refused_when_built(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("\n{% for %}")
    with pytest.raises(CheckpointError, match=r"chat template is not valid Jinja.*line 2"):
        written(folder)
    assert not (folder.parent / "tokenizer").exists()


def test_special_tokens_as_objects_and_in_the_older_file(folder: Path) -> None:
    change_config(folder, bos_token={"content": "<s>", "lstrip": False}, additional_special_tokens=["<|im_start|>"])
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<unk>"}, "bos_token": "old"}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}|{{ pad_token }}|{{ additional_special_tokens[0] }}")
    assert written(folder).render_chat(USER) == "<s>|<unk>|<|im_start|>"


@pytest.mark.parametrize("add_bos_token", [True, False, None])
@pytest.mark.parametrize("single", ["<s> $A", "$A", None])
def test_tokenizer_json_alone_decides_on_bos_as_in_transformers(
    folder: Path, add_bos_token: bool | None, single: str | None
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    if single is not None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", 1)])
        tokenizer.save(str(folder / "tokenizer.json"))
    if add_bos_token is not None:
        change_config(folder, add_bos_token=add_bos_token)
    ids = written(folder).encode("a")
    assert ids == AutoTokenizer.from_pretrained(folder)("a")["input_ids"]
    assert (ids[0] == 1) == (single == "<s> $A")


def test_missing_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    (folder / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json \(.*tokenizer\.model\).*save_pretrained"):
        written(folder)


def test_damaged_tokenizer_json_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer\.json"):
        written(folder)


def test_tokenizer_is_replaced_whole(folder: Path) -> None:
    written(folder)
    (folder.parent / "tokenizer" / "stale").write_text("")
    written(folder)
    assert not (folder.parent / "tokenizer" / "stale").exists()
