"""Prompts from JSON lines, split into those that train and those that are held out."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.errors import RequestError
from dspark_trt.text import TextCodec


@dataclass(frozen=True)
class Prompt:
    source: str  # the data set or kind that it comes from; the file's name where the line does not say
    text: str
    split: str | None = None  # "held_out", or anything else to train on it; None: by its text

    @property
    def is_held_out(self) -> bool:
        """One prompt in twenty where the file does not say, by its text: every script makes the same split in every
        run."""
        if self.split is not None:
            return self.split == "held_out"
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], "little") % 20 == 0


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """Each line is {"prompt": ..., "source" or "kind": ..., "split": ...}; only `prompt` must be there. Equal prompts
    are kept once. Lines end at line feeds alone: other separators of Unicode may stand inside a JSON string.

    Raises RequestError, which names file and line, for anything else.
    """
    prompts: dict[str, Prompt] = {}
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
                source = values.get("source", values.get("kind", file.stem))
                prompt = Prompt(str(source), values["prompt"], values.get("split"))
                if not isinstance(prompt.text, str):
                    raise ValueError(f"prompt is of type {type(prompt.text).__name__}")
            except (ValueError, KeyError, AttributeError) as error:
                raise RequestError(
                    f'{file}:{number}: expected an object {{"prompt": "...", "source": "..."}} ({error!r})'
                ) from None
            prompts.setdefault(prompt.text, prompt)
    return list(prompts.values())


def training_prompts(prompts: Sequence[Prompt], unseen_sources: Collection[str]) -> list[Prompt]:
    """Neither held out nor of a source that training must never see."""
    return [prompt for prompt in prompts if not prompt.is_held_out and prompt.source not in unseen_sources]


def open_codec(target: str) -> TextCodec:
    """The tokenizer and chat template of the target."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(target, Path(folder) / "tokenizer")
        return TextCodec.load(Path(folder) / "tokenizer")


def encode(codec: TextCodec, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
    """The ids of each prompt as a chat of one message; longer ones are left out."""
    encoded = (codec.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts)
    return [ids for ids in encoded if len(ids) <= max_tokens]
