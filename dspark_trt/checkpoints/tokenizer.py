"""Brings the target's tokenizer, chat template and special tokens into the build directory, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from dspark_trt.checkpoints.config import read_json
from dspark_trt.checkpoints.gguf_target import open_gguf
from dspark_trt.checkpoints.gguf_tokenizer import gguf_text
from dspark_trt.checkpoints.locate import locate
from dspark_trt.checkpoints.opening import check_file
from dspark_trt.checkpoints.target_text import SpecialTokens, TargetText
from dspark_trt.errors import CheckpointError
from dspark_trt.files import replace_folder
from dspark_trt.text import SETTINGS_FILE, TEMPLATE_FILE, TOKENIZER_FILE, TextCodec, TextSettings

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_MAX_GROWTH = 4096  # of a text by all replacements together


def write_tokenizer(
    source: str,
    destination: Path,
    revision: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Write the folder `destination` for `TextCodec.load`, from the target at `source` (as for `read_target`).

    Raises CheckpointError when there is no tokenizer.json, when a GGUF file's tokenizer is of a kind that is not known,
    or when the chat template is not valid Jinja.
    """
    path = locate(source, revision)
    text = gguf_text(open_gguf(path), path) if path.is_file() else folder_text(path)
    settings = TextSettings(special_tokens=text.special_tokens, chat_template_kwargs=dict(chat_template_kwargs or {}))
    try:
        TextCodec(text.tokenizer, settings, text.template)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{path}: the chat template is not valid Jinja: {error} (line {error.lineno})") from None
    except Exception as error:  # what compiling a template raises depends on the template
        raise CheckpointError(f"{path}: the chat template cannot be used: {error}") from None
    with replace_folder(destination) as folder:
        text.tokenizer.save(str(folder / TOKENIZER_FILE))
        (folder / SETTINGS_FILE).write_text(settings.model_dump_json(indent=1) + "\n", encoding="utf-8")
        if text.template is not None:
            (folder / TEMPLATE_FILE).write_text(text.template, encoding="utf-8")


def folder_text(folder: Path) -> TargetText:
    """Of a Hugging Face folder. Raises CheckpointError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        other = ", ".join(sorted(path.name for path in folder.glob("*token*"))) or "none"
        raise CheckpointError(
            f"{folder}: no tokenizer.json (other tokenizer files: {other}); write one with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers, or copy it from the model's "
            "publisher"
        )
    check_file(file)
    _check_growth(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{file}: not a tokenizer.json ({error}); download it again") from None
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    return TargetText(tokenizer, _chat_template(folder, config), _special_tokens(folder, config))


def _check_growth(file: Path) -> None:
    """Raises CheckpointError where replacements, one after the other, would make a short text fill the memory."""
    growth, waiting = 1.0, [*read_json(file).values()]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and part.get("type") == "Replace":
            pattern, content = part.get("pattern"), part.get("content")
            literal = pattern.get("String") if isinstance(pattern, dict) else None
            length = len(content) if isinstance(content, str) else 0
            growth *= max(1.0, length / len(literal) if isinstance(literal, str) and literal else length + 1)
        elif isinstance(part, dict) and not part.keys() >= {"vocab", "merges"}:
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    if growth > _MAX_GROWTH:
        raise CheckpointError(
            f"{file}: its replacements can make a text {growth:.0e} times as long, expected at most {_MAX_GROWTH} "
            "times; use the tokenizer of the model's publisher"
        )


def _special_tokens(folder: Path, config: dict[str, Any]) -> SpecialTokens:
    """The variables that transformers hands to a template; an entry is a string or an object with `content`."""
    older = folder / "special_tokens_map.json"
    values = (read_json(older) if older.is_file() else {}) | config
    tokens: SpecialTokens = {key: _content(values[key]) for key in _SPECIAL_TOKENS if values.get(key) is not None}
    if isinstance(more := values.get("additional_special_tokens"), list) and more:
        tokens["additional_special_tokens"] = [_content(token) for token in more]
    return tokens


def _content(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / TEMPLATE_FILE
    if file.is_file():
        check_file(file)
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if not isinstance(template, list):
        return template if isinstance(template, str) else None
    named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if "default" not in named:
        raise CheckpointError(
            f"{folder}: tokenizer_config.json has chat templates named {sorted(map(str, named))}, none of them "
            f"'default'; write the one to use into {TEMPLATE_FILE}"
        )
    return str(named["default"])
