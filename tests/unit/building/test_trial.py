"""S11, S12: text and templates of a checkpoint are tried out where they can do no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dspark_trt.building import trial
from dspark_trt.building.trial import try_text
from dspark_trt.checkpoints.target import read_target
from dspark_trt.checkpoints.tokenizer import folder_text, write_tokenizer
from dspark_trt.errors import CheckpointError
from tests.support.factories import write_target

DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPACES = {"type": "Replace", "pattern": {"Regex": " +"}, "content": "x" * 100}


def set_normalizer(folder: Path, normalizers: list[dict[str, Any]]) -> None:
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text()) | {"normalizer": {"type": "Sequence", "normalizers": normalizers}}
    file.write_text(json.dumps(values))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", vocab_size=320, tokenizer=True)


@pytest.fixture
def folder(target: Path, tmp_path: Path) -> Path:
    write_tokenizer(str(target), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_usual_tokenizer_and_template_pass(folder: Path) -> None:
    try_text(folder, "target")


def test_template_may_refuse_a_chat(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only tools') }}")
    try_text(folder, "target")


@pytest.mark.parametrize(
    "template", ["{{ 'a' * 999999999 }}", "{% for i in range(9) %}{{ 7 ** (7 ** 9) }}{% endfor %}"]
)
def test_template_that_takes_too_much_ends_the_build(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=r"target: encoding and rendering a chat .* fails \(the chat template"):
        try_text(folder, "target")


def test_tokenizer_that_fills_the_memory_ends_the_trial_and_not_the_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty doublings: the build itself was killed."""
    monkeypatch.setattr(trial, "_MAX_MEMORY_BYTES", 2**28)
    set_normalizer(folder, [DOUBLING] * 40)
    with pytest.raises(CheckpointError, match=r"target: encoding .* fails .*may take 256 MiB of memory"):
        try_text(folder, "target")


def test_trial_that_does_not_end_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_TIMEOUT_S", 0.01)
    with pytest.raises(CheckpointError, match=r"takes more than 0\.01 s"):
        try_text(folder, "target")


@pytest.mark.parametrize("normalizers", [[DOUBLING] * 40, [SPACES] * 3])
def test_replacements_that_multiply_are_refused_before_the_tokenizer_is_opened(
    target: Path, tmp_path: Path, normalizers: list[dict[str, Any]]
) -> None:
    """An added token is normalised when the tokenizer is opened, in the build's own process."""
    set_normalizer(target, normalizers)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: its replacements can make a text .* times as long"):
        write_tokenizer(str(target), tmp_path / "tokenizer")
    assert read_target(str(target)).spec.eos_token_ids, "read as one without a tokenizer"


@pytest.mark.parametrize("normalizers", [[DOUBLING] * 4, [SPACES], [{**DOUBLING, "content": "▁"}] * 40])
def test_usual_replacements_pass(target: Path, normalizers: list[dict[str, Any]]) -> None:
    set_normalizer(target, normalizers)
    folder_text(target)
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode("a").ids
