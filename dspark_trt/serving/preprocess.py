"""The ensemble's first step: text, or a chat, to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import RequestError
from dspark_trt.packaging.signature import ENGINE_FIELDS, PREPROCESSING_FIELDS
from dspark_trt.serving.fields import Fields, Tensors, pack_sequences, refuse_unknown
from dspark_trt.text import TextCodec

_CLIENT_NAMES = {field.step_tensor().name: field.name for field in PREPROCESSING_FIELDS}
_KNOWN = tuple(field.name for field in (*PREPROCESSING_FIELDS, *ENGINE_FIELDS))


def preprocess(tensors: Tensors, parameters: Iterable[str], codec: TextCodec) -> Mapping[str, NDArray[Any]]:
    """The output tensors for one request. Raises RequestError that names the field which is not acceptable."""
    refuse_unknown(parameters, _KNOWN)
    fields = Fields(tensors, _CLIENT_NAMES)
    if fields.texts("EMBEDDING_BIAS_WORDS") or tensors.get("EMBEDDING_BIAS_WEIGHTS") is not None:
        raise RequestError("embedding_bias_words, embedding_bias_weights: not supported; use logit_bias (by token id)")
    prompt_ids = _prompt_ids(fields, codec)
    return {
        "INPUT_ID": np.array([prompt_ids], dtype=np.int32),
        "REQUEST_INPUT_LEN": np.array([[len(prompt_ids)]], dtype=np.int32),
        "BAD_WORDS_IDS": pack_sequences(codec.encode_words(fields.texts("BAD_WORDS_DICT"))),
    }


def _prompt_ids(fields: Fields, codec: TextCodec) -> list[int]:
    text = fields.text("QUERY") or ""
    messages = fields.json_list("MESSAGES")
    template_kwargs = fields.json_object("CHAT_TEMPLATE_KWARGS")
    if messages is not None:
        if text:
            raise RequestError("text_input, messages: expected one of them, found both; leave text_input empty")
        return codec.encode_chat(messages, **template_kwargs)
    if not text:
        raise RequestError("text_input: the prompt is empty; send some text, or messages")
    if fields.flag("CHAT"):
        return codec.encode_chat([{"role": "user", "content": text}], **template_kwargs)
    if template_kwargs:
        raise RequestError(
            "chat_template_kwargs: expected with chat or messages only; a plain text_input has no template"
        )
    return codec.encode(text)
