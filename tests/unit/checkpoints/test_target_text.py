"""End tokens from every source, and tokenizers that do not fit the embedding.

Ids 0 to 3 of the tokenizer are <unk>, <s>, <|im_end|> and <|im_start|>.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.factories import write_target


def target(folder: Path, *, config: object, generation: object, tokenizer: str | None, template: str | None) -> Path:
    """Each source of end tokens says what is given for it."""
    write_target(folder, vocab_size=320, tokenizer=True, config_extra={"eos_token_id": config})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"bos_token": "<s>", "eos_token": tokenizer, "chat_template": template}))
    return folder


def ends_with(token: str) -> str:
    return "{% for m in messages %}<s>{{ m.role }} {{ m.content }}" + token + "{% endfor %}"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"config": 2}, (2,)),
        ({"generation": [3, 2]}, (3, 2)),
        ({"tokenizer": "<|im_start|>"}, (3,)),
        ({"template": ends_with("<|im_start|>")}, (3,)),
        ({"config": 2, "generation": 0, "tokenizer": "<s>", "template": ends_with(" <|im_start|>")}, (0, 2, 1, 3)),
        ({"config": 2, "template": ends_with("\n")}, (2,)),
        ({"config": 2, "template": "{{ raise_exception('no') }}"}, (2,)),
        ({"config": 2, "template": "{% for %}"}, (2,)),
        ({"config": 2, "tokenizer": "no such token"}, (2,)),
        ({"config": -1, "tokenizer": "<|im_end|>"}, (2,)),
    ],
)
def test_every_source_of_end_tokens_counts(sources: dict, expected: tuple[int, ...], tmp_path: Path) -> None:
    nothing = dict.fromkeys(("config", "generation", "tokenizer", "template"))
    folder = target(tmp_path, **nothing | sources)
    assert read_target(str(folder)).spec.eos_token_ids == expected


def test_sources_that_disagree_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = target(tmp_path, config=2, generation=[2], tokenizer="<|im_end|>", template=ends_with("<|im_start|>"))
    with caplog.at_level(logging.WARNING):
        read_target(str(folder))
    (warning,) = caplog.messages
    assert "generation_config.json ends texts at [2], chat template (end of a turn) at [3] too" in warning


def test_sources_that_agree_are_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_target(str(write_target(tmp_path, vocab_size=320, tokenizer=True)))
    assert caplog.messages == []


@pytest.mark.parametrize("is_special", [True, False])
def test_a_tokenizer_larger_than_the_embedding_is_refused(is_special: bool, tmp_path: Path) -> None:
    folder = write_target(tmp_path, vocab_size=320, tokenizer=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
    add([AddedToken("[PAD]")])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"token '\[PAD\]' has id 320, but the embedding has 320 rows"):
        read_target(str(folder))


def test_a_target_without_a_tokenizer_is_read_all_the_same(tmp_path: Path) -> None:
    assert read_target(str(write_target(tmp_path))).spec.eos_token_ids == (2, 3)
