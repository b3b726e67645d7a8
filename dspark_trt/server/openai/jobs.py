"""A client's request as requests to the engine model, one for each answer."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.packaging.signature import ENGINE_FIELDS, PREPROCESSING_FIELDS, Field
from dspark_trt.server.openai.errors import refused
from dspark_trt.server.openai.messages import chat_messages
from dspark_trt.server.openai.requests import MAX_INT32, ChatRequest, CompletionRequest, GenerationFields
from dspark_trt.server.openai.settings import FrontEndSettings
from dspark_trt.server.openai.triton import Models
from dspark_trt.serving.fields import pack_sequences

_DTYPES: dict[str, Any] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "FP32": np.float32,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
}
_FIELDS = {field.name: field for field in (*PREPROCESSING_FIELDS, *ENGINE_FIELDS)}
_END_ID_OFF = -1  # nothing ends the text
_SAME_NAMES = (  # fields of ours that the engine model has under the same name
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "skip_special_tokens",
    "draft",
    "max_verify_len",
    "timeout_ms",
    "priority",
    "cache_salt",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to make."""

    tensors: dict[str, NDArray[Any]]  # of the engine model
    request_id: str
    num_log_probs: int | None  # alternatives to each token; None: no log probabilities


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and the tensors that preprocessing made of it."""

    tensors: dict[str, NDArray[Any]]

    @property
    def num_tokens(self) -> int:
        return int(self.tensors["input_lengths"].item())

    @property
    def token_ids(self) -> list[int]:
        return [int(token_id) for token_id in self.tensors["input_ids"].ravel()]


def timeout_s(request: GenerationFields, settings: FrontEndSettings) -> float:
    """Seconds from now to the last token."""
    return request.timeout_ms / 1e3 if request.timeout_ms else settings.default_timeout_s


async def chat_prompt(request: ChatRequest, models: Models) -> Prompt:
    """Raises ApiError for messages that are no text, or that the template refuses."""
    template_kwargs = dict(request.chat_template_kwargs or {})
    if request.tools and request.tool_choice != "none":
        if "tools" in template_kwargs:
            raise refused("chat_template_kwargs", "tools: expected in the field tools only")
        template_kwargs["tools"] = request.tools
    fields: dict[str, Any] = {"messages": json.dumps(chat_messages(request.messages))}
    if template_kwargs:
        fields["chat_template_kwargs"] = json.dumps(template_kwargs)
    return await _preprocessed(fields, request, models)


async def completion_prompt(
    prompt: str | list[int], request: CompletionRequest, models: Models, max_seq_len: int
) -> Prompt:
    """Raises ApiError."""
    if isinstance(prompt, str):
        return await _preprocessed({"text_input": prompt}, request, models)
    if len(prompt) > max_seq_len:
        raise refused("prompt", f"expected at most {max_seq_len} tokens, found {len(prompt)}")
    words = await _preprocessed({"text_input": "-"}, request, models) if request.bad_words else None
    ids, length = np.array([prompt], np.int32), np.array([[len(prompt)]], np.int32)
    return Prompt({**(words.tensors if words else {}), "input_ids": ids, "input_lengths": length})


async def _preprocessed(fields: dict[str, Any], request: GenerationFields, models: Models) -> Prompt:
    if request.add_special_tokens is not None:
        fields["add_special_tokens"] = request.add_special_tokens
    if request.bad_words:
        fields["bad_words"] = request.bad_words
    result = await models.preprocess(_tensors(fields))
    tensors = {"input_ids": result.as_numpy("INPUT_ID"), "input_lengths": result.as_numpy("REQUEST_INPUT_LEN")}
    if request.bad_words:
        tensors["bad_words_list"] = result.as_numpy("BAD_WORDS_IDS")
    return Prompt(tensors)


def make_jobs(request: ChatRequest | CompletionRequest, prompts: list[Prompt], settings: FrontEndSettings) -> list[Job]:
    """The answers in OpenAI's order: all of the first prompt, then all of the next."""
    fields = _engine_fields(request, settings)
    jobs = []
    for prompt in prompts:
        for index in range(request.n):
            own = fields if request.seed is None else {**fields, "seed": (request.seed + index) % 2**64}
            tensors = {**_tensors(own), **prompt.tensors}
            if request.stop_token_ids:
                tensors["stop_words_list"] = pack_sequences((token_id,) for token_id in request.stop_token_ids)
            if request.num_log_probs:
                tensors["num_top_log_probs"] = np.array([[request.num_log_probs]], np.int32)
            jobs.append(Job(tensors, secrets.token_hex(16), request.num_log_probs))
    return jobs


def _engine_fields(request: ChatRequest | CompletionRequest, settings: FrontEndSettings) -> dict[str, Any]:
    fields = {name: getattr(request, name) for name in _SAME_NAMES}
    fields |= {
        "max_tokens": min(request.limit, settings.max_seq_len),
        "stream": True,  # always: a request that is cancelled ends with its next step
        "stop_words": list(request.stop_words) or None,
        "logit_bias": None if request.logit_bias is None else json.dumps(request.logit_bias),
        "end_id": _END_ID_OFF if request.ignore_eos else None,
        "return_log_probs": None if request.num_log_probs is None else True,
    }
    for name, value in fields.items():
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INT32:
            raise refused(name, f"expected a number of 32 bits, found {value}")
    return {name: value for name, value in fields.items() if value is not None}


def _tensors(fields: dict[str, Any]) -> dict[str, NDArray[Any]]:
    return {_FIELDS[name].step_tensor().name: field_array(_FIELDS[name], value) for name, value in fields.items()}


def field_array(field: Field, value: Any) -> NDArray[Any]:
    """The wire form [1, n] of a field's value, or of a list of them. The values have the field's type."""
    values = value if isinstance(value, list) else [value]
    if field.data_type == "STRING":
        values = [text.encode("utf-8", errors="surrogatepass") for text in values]
    return np.array([values], dtype=_DTYPES[field.data_type])
