"""The ensemble's first step: text, or a chat, to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.building.finished import read_finished
from dspark_trt.building.manifest import check_outputs
from dspark_trt.errors import RequestError
from dspark_trt.packaging.signature import ENGINE_FIELDS, PREPROCESSING_FIELDS
from dspark_trt.serving.fields import Fields, Tensors, pack_sequences, refuse_unknown
from dspark_trt.serving.limits import (
    MAX_BAD_WORDS,
    check_bad_word_ids,
    check_bad_words,
    check_prompt_bytes,
    max_prompt_bytes,
)
from dspark_trt.text import TextCodec

_CLIENT_NAMES = {field.step_tensor().name: field.name for field in PREPROCESSING_FIELDS}
_KNOWN = tuple(field.name for field in (*PREPROCESSING_FIELDS, *ENGINE_FIELDS))


@dataclass(frozen=True, slots=True)
class Preprocessor:
    """The tokenizer of a build, and how many tokens its engines take."""

    codec: TextCodec
    max_seq_len: int

    @classmethod
    def load(cls, build_dir: Path) -> Preprocessor:
        """Raises ManifestError when the build is unfinished, or its tokenizer or graphs were edited or replaced."""
        _, stages = read_finished(build_dir)
        check_outputs(build_dir / "checkpoints", stages["checkpoints"])
        codec = TextCodec.load(build_dir / "checkpoints" / "tokenizer")
        return cls(codec, int(stages["graphs"].settings["limits"]["max_seq_len"]))

    def run(self, tensors: Tensors, parameters: Iterable[str]) -> Mapping[str, NDArray[Any]]:
        """See `preprocess`."""
        return preprocess(tensors, parameters, self.codec, max_seq_len=self.max_seq_len)


def preprocess(
    tensors: Tensors, parameters: Iterable[str], codec: TextCodec, *, max_seq_len: int
) -> Mapping[str, NDArray[Any]]:
    """The output tensors for one request. Raises RequestError that names the field which is not acceptable.

    A text is measured before it is tokenised: everyone waits for a tokenizer, one request at a time.
    """
    refuse_unknown(parameters, _KNOWN)
    fields = Fields(tensors, _CLIENT_NAMES)
    if fields.texts("EMBEDDING_BIAS_WORDS", MAX_BAD_WORDS) or tensors.get("EMBEDDING_BIAS_WEIGHTS") is not None:
        raise RequestError("embedding_bias_words, embedding_bias_weights: not supported; use logit_bias (by token id)")
    bad_words = fields.texts("BAD_WORDS_DICT", MAX_BAD_WORDS)
    check_bad_words(bad_words)
    prompt_ids = _prompt_ids(fields, codec, max_seq_len)
    bad_word_ids = codec.encode_words(bad_words)
    check_bad_word_ids(bad_word_ids)
    return {
        "INPUT_ID": np.array([prompt_ids], dtype=np.int32),
        "REQUEST_INPUT_LEN": np.array([[len(prompt_ids)]], dtype=np.int32),
        "BAD_WORDS_IDS": pack_sequences(bad_word_ids),
    }


def _prompt_ids(fields: Fields, codec: TextCodec, max_seq_len: int) -> list[int]:
    for name in ("QUERY", "MESSAGES"):
        check_prompt_bytes(fields.client_name(name), fields.num_bytes(name), max_seq_len)
    text = fields.text("QUERY") or ""
    messages = fields.json_list("MESSAGES", max_prompt_bytes(max_seq_len))
    template_kwargs = fields.json_object("CHAT_TEMPLATE_KWARGS")
    adds_special_tokens = fields.flag("ADD_SPECIAL_TOKENS")
    if messages is not None:
        if text:
            raise RequestError("text_input, messages: expected one of them, found both; leave text_input empty")
        return _chat_ids(codec, messages, template_kwargs, adds_special_tokens, max_seq_len)
    if not text:
        raise RequestError("text_input: the prompt is empty; send some text, or messages")
    if fields.flag("CHAT"):
        messages = [{"role": "user", "content": text}]
        return _chat_ids(codec, messages, template_kwargs, adds_special_tokens, max_seq_len)
    if template_kwargs:
        raise RequestError(
            "chat_template_kwargs: expected with chat or messages only; a plain text_input has no template"
        )
    return codec.encode(text, add_special_tokens=adds_special_tokens)


def _chat_ids(
    codec: TextCodec,
    messages: list[Any],
    template_kwargs: Mapping[str, Any],
    adds_special_tokens: bool | None,
    max_seq_len: int,
) -> list[int]:
    rendered = codec.render_chat(messages, **template_kwargs)
    check_prompt_bytes("messages", len(rendered.encode(errors="replace")), max_seq_len)
    return codec.encode(rendered, add_special_tokens=adds_special_tokens or False)
