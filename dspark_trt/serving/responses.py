"""From the emissions of a request to the tensors of its responses. Only the outputs that are asked for are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.packaging.signature import ENGINE_OUTPUTS, PACKED, PACKED_OUTPUTS
from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.sampling import TopLogProbs
from dspark_trt.serving.adapter import EngineRequest
from dspark_trt.serving.postprocess import pack
from dspark_trt.serving.sampling_fields import Decode


class ResponseWriter:
    """Turns the emissions of one request into the tensors of its responses."""

    def __init__(self, request: EngineRequest, decode: Decode, wanted: Iterable[str]) -> None:
        """`wanted`: the names of the outputs that are asked for; no others are made."""
        self._request = request
        self._decode = decode
        self._wanted = tuple(name for name in wanted if name in _MAKERS)
        self._cum_log_prob = 0.0
        self._held: list[Emission] = []  # of a request that gets one response at its end

    def write(self, emission: Emission) -> Mapping[str, NDArray[Any]] | None:
        """The response for an emission, or None when it waits for the request's end."""
        if self._request.is_streaming:
            return self._tensors(emission)
        self._held.append(emission)
        return self._tensors(_joined(self._held)) if emission.finish_reason else None

    def _tensors(self, emission: Emission) -> Mapping[str, NDArray[Any]]:
        generation_request = self._request.generation_request
        echoed_ids = generation_request.prompt_ids if self._request.echoes_prompt else ()
        log_probs = emission.log_probs or ()
        self._cum_log_prob += sum(log_probs)
        statistics = emission.statistics
        num_verified = statistics.num_drafts_verified if statistics else 0
        num_accepted = statistics.num_drafts_accepted if statistics else 0
        response = _Response(
            token_ids=(*echoed_ids, *emission.token_ids),
            text=(self._decode(generation_request.prompt_ids) if echoed_ids else "") + emission.text,
            handle=self._request.handle,
            log_probs=log_probs,
            top_log_probs=emission.top_log_probs or (),
            finish_reason=emission.finish_reason or "",
            numbers={
                "cum_log_probs": self._cum_log_prob,
                "batch_index": 0,
                "sequence_index": generation_request.sequence_index,
                "num_input_tokens": len(generation_request.prompt_ids),
                "num_output_tokens": len(emission.token_ids),
                "acceptance_rate": num_accepted / num_verified if num_verified else 0.0,
                "total_draft_tokens": num_verified,
                "total_accepted_draft_tokens": num_accepted,
                "num_steps": statistics.num_steps if statistics else 0,
                "num_cached_tokens": statistics.num_prompt_tokens_reused if statistics else 0,
            },
        )
        return {name: _MAKERS[name](response) for name in self._wanted}


@dataclass(frozen=True, slots=True)
class _Response:
    """What one response says, before it is made into tensors."""

    token_ids: tuple[int, ...]
    text: str
    handle: int
    log_probs: tuple[float, ...]
    top_log_probs: tuple[TopLogProbs, ...]
    finish_reason: str
    numbers: Mapping[str, float]


def _number(name: str) -> Callable[[_Response], NDArray[Any]]:
    data_type = next(tensor.data_type for tensor in ENGINE_OUTPUTS if tensor.name == name)
    dtype = np.float32 if data_type == "FP32" else np.int32
    return lambda response: np.array([[response.numbers[name]]], dtype=dtype)


def _string(text: str) -> NDArray[np.object_]:
    return np.array([[text.encode()]], dtype=np.object_)


def _alternatives(part: int, dtype: Any) -> Callable[[_Response], NDArray[Any]]:
    """[1, tokens, alternatives], the most probable first; part 0: their ids, part 1: their log probabilities."""

    def make(response: _Response) -> NDArray[Any]:
        values = [[pair[part] for pair in of_token] for of_token in response.top_log_probs]
        return np.array([values], dtype=dtype).reshape(1, len(values), -1 if values and values[0] else 0)

    return make


_MAKERS: dict[str, Callable[[_Response], NDArray[Any]]] = {
    "output_ids": lambda response: np.array([[response.token_ids]], dtype=np.int32),
    "sequence_length": lambda response: np.array([[len(response.token_ids)]], dtype=np.int32),
    "text": lambda response: _string(response.text),
    "handle": lambda response: np.array([[response.handle]], dtype=np.int64),
    "output_log_probs": lambda response: np.array([[response.log_probs]], dtype=np.float32),
    "top_token_ids": _alternatives(0, np.int32),
    "top_log_probs": _alternatives(1, np.float32),
    "finish_reason": lambda response: _string(response.finish_reason),
    PACKED.name: lambda response: pack(response.numbers),
    **{name: _number(name) for name in PACKED_OUTPUTS},
}


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
        top_log_probs=tuple(value for emission in emissions for value in emission.top_log_probs or ()),
        finish_reason=last.finish_reason,
        statistics=last.statistics,
    )
