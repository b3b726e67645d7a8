"""Between the engine model's tensors and the runtime's requests and emissions. Knows nothing of Triton itself.

What a client of TensorRT-LLM's backend may send is either honoured or refused by name; the values that such clients
always send for "off" (beam_width 1, length_penalty 1, ...) pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from dspark_trt.errors import RequestError
from dspark_trt.packaging.signature import ALIASES, ENGINE_FIELDS, ENGINE_ONLY_INPUTS
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.serving.fields import Fields, Tensors, refuse_unknown
from dspark_trt.serving.limits import (
    MAX_CLIENT_ID_CHARACTERS,
    MAX_PRIORITY,
    MAX_TIMEOUT_MS,
    MIN_PRIORITY,
    check_count,
)
from dspark_trt.serving.sampling_fields import Decode, sampling_fields

MakeSampling = Callable[..., SamplingParams]  # what was given (None: not given), over the checkpoint's defaults

_CLIENT_NAMES = {field.step_tensor().name: field.name for field in ENGINE_FIELDS}
_STEP_NAMES = {name: step_name for step_name, name in _CLIENT_NAMES.items()}
_KNOWN = tuple(_CLIENT_NAMES) + tuple(tensor.name for tensor in ENGINE_ONLY_INPUTS)

# Field -> the one value that means "off", and what to do instead.
_ONLY_VALUE: dict[str, tuple[Any, str]] = {
    "beam_width": (1, "beam search is not supported"),
    "num_return_sequences": (1, "send one request for each sequence, with different seeds"),
    "len_penalty": (1.0, "it ranks beams, and beam search is not supported"),
    "return_perf_metrics": (False, "its outputs do not exist; see acceptance_rate, num_steps and the metrics endpoint"),
    "lora_task_id": (0, "LoRA is not supported"),
}


# Field of the runtime -> what a client calls it.
_RUNTIME_NAMES = {
    "prompt_ids": "text_input",
    "stop_token_ids": "end_id",
    "stop_strings": "stop_words",
    "num_log_probs": "num_top_log_probs",
}


@dataclass(frozen=True, slots=True)
class StopCommand:
    """A request to end another one: by the handle that its responses carry, else by the request id of the client."""

    handle: int | None
    client_id: str
    answer: Callable[[str | None], None] = lambda refusal: None  # called with the reason of a refusal, or None

    def names(self, request: EngineRequest) -> bool:
        return self.handle == request.handle if self.handle is not None else self.client_id == request.client_id


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the engine model was asked for."""

    generation_request: GenerationRequest
    handle: int  # names the request in responses and to stop it
    client_id: str  # the client's request id; may be empty, need not be unique
    is_streaming: bool
    echoes_prompt: bool  # text and ids of the prompt in front of the answer, where it is one response
    timeout_s: float | None = None  # from arrival to the last token; None: the server's default
    priority: int = 0  # the lowest first
    is_probe: bool = False  # answered at once and without tokens by the thread that decodes
    is_in_ensemble: bool = False  # its responses pass through postprocessing


def read_stop(
    tensors: Tensors, client_id: str, answer: Callable[[str | None], None] = lambda refusal: None
) -> StopCommand | None:
    """The stop request that the tensors are, or None when they ask for something to generate."""
    fields = Fields(tensors)
    if not fields.flag("stop"):
        return None
    handle = fields.integer("stop_handle")
    if handle is None and not client_id:
        raise RequestError("stop: expected the request id of the request to stop, or its stop_handle, found neither")
    return StopCommand(handle, client_id, answer)


def read_request(
    tensors: Tensors,
    parameters: Iterable[str],
    *,
    handle: int,
    client_id: str,
    decode: Decode,
    make_sampling: MakeSampling,
    is_in_ensemble: bool = False,
    max_tokens: int | None = None,
) -> EngineRequest:
    """Raises RequestError that names the field which is not acceptable. A larger max_tokens is cut to `max_tokens`."""
    refuse_unknown(parameters, _KNOWN)
    check_count("request id", len(client_id), MAX_CLIENT_ID_CHARACTERS, "characters")
    fields = _under_one_name(tensors)
    _refuse_unsupported(fields)
    is_streaming = fields.flag("streaming") or False
    sampling = make_sampling(**sampling_fields(fields, decode))
    if max_tokens is not None and sampling.max_tokens > max_tokens >= sampling.min_tokens:
        sampling = replace(sampling, max_tokens=max_tokens)
    return EngineRequest(
        generation_request=GenerationRequest(
            request_id=str(handle),
            prompt_ids=_prompt_ids(fields),
            sampling=sampling,
            max_verify_len=_max_verify_len(fields),
            cache_salt=fields.text("cache_salt") or "",
        ),
        handle=handle,
        client_id=client_id,
        is_streaming=is_streaming,
        echoes_prompt=not is_streaming and fields.flag("exclude_input_in_output") is False,
        timeout_s=_timeout_s(fields),
        priority=_priority(fields),
        is_probe=fields.flag("probe") or False,
        is_in_ensemble=is_in_ensemble,
    )


def with_client_names(error: RequestError) -> RequestError:
    """A refusal of the runtime, in the words of the client."""
    name, colon, rest = str(error).partition(":")
    return RequestError(f"{_RUNTIME_NAMES[name]}:{rest}") if colon and name in _RUNTIME_NAMES else error


def _under_one_name(tensors: Tensors) -> Fields:
    """A field that came under another name is read under ours, and refused under the client's."""
    came = {alias: name for alias, name in ALIASES.items() if tensors.get(_STEP_NAMES[alias]) is not None}
    renamed = {_STEP_NAMES[name]: tensors[_STEP_NAMES[alias]] for alias, name in came.items()}
    for alias, name in came.items():
        if tensors.get(_STEP_NAMES[name]) is not None:
            raise RequestError(f"{alias}: another name of {name}; send one of them")
    if not came:
        return Fields(tensors, _CLIENT_NAMES)
    return Fields({**tensors, **renamed}, _CLIENT_NAMES | {_STEP_NAMES[name]: alias for alias, name in came.items()})


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


def _timeout_s(fields: Fields) -> float | None:
    found = fields.integer("timeout_ms")
    if found is None or found == 0:  # what a client sends for "none of mine"
        return None
    if not 0 < found <= MAX_TIMEOUT_MS:
        raise fields.refusal("timeout_ms", f"an integer in 0..{MAX_TIMEOUT_MS} (0: the server's default)", found)
    return found / 1e3


def _priority(fields: Fields) -> int:
    found = fields.integer("priority") or 0
    if not MIN_PRIORITY <= found <= MAX_PRIORITY:
        raise fields.refusal("priority", f"an integer in {MIN_PRIORITY}..{MAX_PRIORITY}, the lowest first", found)
    return found


def _max_verify_len(fields: Fields) -> int | None:
    found = fields.integer("max_verify_len")
    if found is not None and found < 0:
        raise fields.refusal("max_verify_len", "an integer >= 0 (0: decode without drafts)", found)
    return 0 if fields.flag("draft") is False else found
