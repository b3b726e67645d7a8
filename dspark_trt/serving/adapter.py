"""Between the engine model's tensors and the runtime's requests and emissions. Knows nothing of Triton itself.

What a client of TensorRT-LLM's backend may send is either honoured or refused by name; the values that such clients
always send for "off" (beam_width 1, length_penalty 1, ...) pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import RequestError
from dspark_trt.packaging.signature import ENGINE_FIELDS, ENGINE_ONLY_INPUTS
from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.serving.fields import Fields, Tensors, refuse_unknown

Decode = Callable[[Sequence[int]], str]
MakeSampling = Callable[..., SamplingParams]  # what was given (None: not given), over the checkpoint's defaults

_CLIENT_NAMES = {field.step_tensor().name: field.name for field in ENGINE_FIELDS}
_KNOWN = tuple(_CLIENT_NAMES) + tuple(tensor.name for tensor in ENGINE_ONLY_INPUTS)

# Field -> the one value that means "off", and what to do instead.
_ONLY_VALUE: dict[str, tuple[Any, str]] = {
    "beam_width": (1, "beam search is not supported"),
    "num_return_sequences": (1, "send one request for each sequence, with different seeds"),
    "len_penalty": (1.0, "it ranks beams, and beam search is not supported"),
    "return_perf_metrics": (False, "its outputs do not exist; see acceptance_rate, num_steps and the metrics endpoint"),
    "lora_task_id": (0, "LoRA is not supported"),
}


@dataclass(frozen=True, slots=True)
class StopCommand:
    """A request to end another one: by the handle that its responses carry, else by the request id of the client."""

    handle: int | None
    client_id: str


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the engine model was asked for."""

    generation: GenerationRequest
    handle: int  # names the request in responses and to stop it
    client_id: str  # the client's request id; may be empty, need not be unique
    is_streaming: bool
    echoes_prompt: bool  # text and ids of the prompt in front of the answer, where it is one response


def read_stop(tensors: Tensors, client_id: str) -> StopCommand | None:
    """The stop request that the tensors are, or None when they ask for something to generate."""
    fields = Fields(tensors)
    if not fields.flag("stop"):
        return None
    handle = fields.integer("stop_handle")
    if handle is None and not client_id:
        raise RequestError("stop: expected the request id of the request to stop, or its stop_handle, found neither")
    return StopCommand(handle, client_id)


def read_request(
    tensors: Tensors,
    parameters: Iterable[str],
    *,
    handle: int,
    client_id: str,
    decode: Decode,
    make_sampling: MakeSampling,
) -> EngineRequest:
    """Raises RequestError that names the field which is not acceptable."""
    refuse_unknown(parameters, _KNOWN)
    fields = Fields(tensors, _CLIENT_NAMES)
    _refuse_unsupported(fields)
    is_streaming = fields.flag("streaming") or False
    return EngineRequest(
        generation=GenerationRequest(
            request_id=str(handle),
            prompt_ids=_prompt_ids(fields),
            sampling=make_sampling(**_sampling_fields(fields, decode)),
        ),
        handle=handle,
        client_id=client_id,
        is_streaming=is_streaming,
        echoes_prompt=not is_streaming and fields.flag("exclude_input_in_output") is False,
    )


def _refuse_unsupported(fields: Fields) -> None:
    for name, (accepted, remedy) in _ONLY_VALUE.items():
        found = fields.number(name)
        if found is not None and found != accepted:
            raise RequestError(f"{fields.client_name(name)}: expected {accepted}, found {found:g}; {remedy}")
    for name in ("guided_decoding_guide", "guided_decoding_guide_type"):
        if fields.text(name):
            raise RequestError(f"{name}: guided decoding is not supported; leave the field out")


def _prompt_ids(fields: Fields) -> tuple[int, ...]:
    prompt_ids = fields.token_ids("input_ids") or ()
    length = fields.integer("input_lengths")
    if length is None or not 0 <= length <= len(prompt_ids):
        raise fields.refusal(
            "input_lengths", f"the number of prompt tokens in input_ids, at most {len(prompt_ids)}", length
        )
    return prompt_ids[:length]


def _sampling_fields(fields: Fields, decode: Decode) -> dict[str, Any]:
    stop_words = (*fields.texts("stop_words"), *(decode(ids) for ids in fields.token_sequences("stop_words_list")))
    end_id = fields.integer("end_id")  # replaces the checkpoint's own EOS ids; -1: nothing ends the text
    max_tokens = fields.integer("request_output_len")
    if max_tokens is None:
        raise fields.refusal("request_output_len", "the most tokens to generate, as every request must say", None)
    return {
        "max_tokens": max_tokens,
        "min_tokens": _min_tokens(fields),
        "temperature": fields.number("temperature"),
        "top_k": fields.integer("runtime_top_k"),
        "top_p": fields.number("runtime_top_p"),
        "min_p": fields.number("min_p"),
        "seed": fields.integer("seed"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "logit_bias": _logit_bias(fields),
        "bad_words": fields.token_sequences("bad_words_list"),
        "stop_strings": stop_words,
        "stop_token_ids": (end_id,) if end_id is not None and end_id >= 0 else (),
        "ignore_eos": end_id is not None,
        "num_log_probs": 0 if fields.flag("return_log_probs") else None,
    }


def _min_tokens(fields: Fields) -> int | None:
    min_tokens, min_length = fields.integer("min_tokens"), fields.integer("min_length")
    if min_tokens is not None and min_length is not None and min_tokens != min_length:
        raise fields.refusal("min_length", f"the same as its other name, min_tokens = {min_tokens}", min_length)
    return min_length if min_tokens is None else min_tokens


def _logit_bias(fields: Fields) -> dict[int, float]:
    biases = fields.json_object("logit_bias")
    try:
        return {int(token_id): float(bias) for token_id, bias in biases.items()}
    except (TypeError, ValueError):
        raise fields.refusal("logit_bias", "a JSON object of token ids and numbers", biases) from None


class ResponseWriter:
    """Turns the emissions of one request into the tensors of its responses."""

    def __init__(self, request: EngineRequest, decode: Decode) -> None:
        self._request = request
        self._decode = decode
        self._cum_log_prob = 0.0
        self._held: list[Emission] = []  # of a request that gets one response at its end

    def write(self, emission: Emission) -> Mapping[str, NDArray[Any]] | None:
        """The response for an emission, or None when it waits for the request's end."""
        if self._request.is_streaming:
            return self._tensors(emission)
        self._held.append(emission)
        return self._tensors(_joined(self._held)) if emission.finish_reason else None

    def _tensors(self, emission: Emission) -> Mapping[str, NDArray[Any]]:
        prompt_ids = self._request.generation.prompt_ids
        echoed_ids = prompt_ids if self._request.echoes_prompt else ()
        token_ids = (*echoed_ids, *emission.token_ids)
        text = (self._decode(prompt_ids) if echoed_ids else "") + emission.text
        log_probs = emission.log_probs or ()
        self._cum_log_prob += sum(log_probs)
        statistics = emission.statistics
        num_verified = statistics.num_drafts_verified if statistics else 0
        num_accepted = statistics.num_drafts_accepted if statistics else 0
        return {
            "output_ids": np.array([[token_ids]], dtype=np.int32),
            "sequence_length": np.array([[len(token_ids)]], dtype=np.int32),
            "text": np.array([[text.encode()]], dtype=np.object_),
            "handle": np.array([[self._request.handle]], dtype=np.int64),
            "cum_log_probs": np.array([[self._cum_log_prob]], dtype=np.float32),
            "output_log_probs": np.array([[log_probs]], dtype=np.float32),
            "batch_index": _int32(0),
            "sequence_index": _int32(self._request.generation.sequence_index),
            "num_input_tokens": _int32(len(prompt_ids)),
            "num_output_tokens": _int32(len(emission.token_ids)),
            "finish_reason": np.array([[(emission.finish_reason or "").encode()]], dtype=np.object_),
            "acceptance_rate": np.array([[num_accepted / num_verified if num_verified else 0.0]], dtype=np.float32),
            "total_draft_tokens": _int32(num_verified),
            "total_accepted_draft_tokens": _int32(num_accepted),
            "num_steps": _int32(statistics.num_steps if statistics else 0),
        }


def _int32(value: int) -> NDArray[np.int32]:
    return np.array([[value]], dtype=np.int32)


def _joined(emissions: Sequence[Emission]) -> Emission:
    """All emissions of a request as one."""
    last = emissions[-1]
    has_log_probs = any(emission.log_probs is not None for emission in emissions)
    log_probs = tuple(value for emission in emissions for value in emission.log_probs or ())
    return Emission(
        request_id=last.request_id,
        token_ids=tuple(token_id for emission in emissions for token_id in emission.token_ids),
        text="".join(emission.text for emission in emissions),
        log_probs=log_probs if has_log_probs else None,
        finish_reason=last.finish_reason,
        statistics=last.statistics,
    )
