"""Triton's `generate` and `generate_stream` for the ensemble, behind the limits of this front end.

The JSON is taken apart here and goes on as gRPC: the HTTP server of Triton, which older releases must not show to other
machines, sees none of it. What comes back is written as Triton writes it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import tritonclient.grpc.aio as triton
from numpy.typing import NDArray

from dspark_trt.packaging.signature import ENGINE_FIELDS, ENSEMBLE, PREPROCESSING_FIELDS, Field
from dspark_trt.server.openai.answers import event
from dspark_trt.server.openai.errors import ApiError, internal
from dspark_trt.server.openai.jobs import field_array
from dspark_trt.server.openai.triton import Models
from dspark_trt.serving.limits import MAX_BAD_WORDS, shorten

_FIELDS = {field.name: field for field in (*PREPROCESSING_FIELDS, *ENGINE_FIELDS)}
_INTEGERS = {
    "INT32": range(-(2**31), 2**31),
    "INT64": range(-(2**63), 2**63),
    "UINT64": range(2**64),
}
_WHAT = {"STRING": "a string", "BOOL": "true or false", "FP32": "a number", "INT32": "an integer of 32 bits"}


def read_fields(body: dict[str, Any], *, streams: bool) -> dict[str, NDArray[Any]]:
    """The ensemble's tensors for one request. Raises ApiError that names the field which is not acceptable."""
    if body.get("stream") is True and not streams:
        raise ApiError(400, "stream: expected with generate_stream only; generate answers once")
    tensors = {}
    for name, value in body.items():
        if name == "id" and isinstance(value, str):  # Triton's own field for a request id
            continue
        if name not in _FIELDS:
            raise ApiError(400, f"unknown field {shorten(name)}; known fields: {', '.join(_FIELDS)}")
        tensors[name] = _array(_FIELDS[name], value)
    return tensors


def _array(field: Field, value: Any) -> NDArray[Any]:
    values = value if isinstance(value, list) else [value]
    limit = 1 if field.dims == (1,) else MAX_BAD_WORDS
    is_missing = limit == 1 and not values
    if is_missing or len(values) > limit or not all(_has_type(item, field.data_type) for item in values):
        what = _WHAT.get(field.data_type, "an integer of 64 bits")
        expected = what if limit == 1 else f"at most {limit} values, each {what}"
        raise ApiError(400, f"{field.name}: expected {expected}, found {shorten(value)}")
    return field_array(field, values)


def _has_type(value: Any, data_type: str) -> bool:
    if data_type in _INTEGERS:
        return isinstance(value, int) and not isinstance(value, bool) and value in _INTEGERS[data_type]
    if data_type == "FP32":
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e38
    return isinstance(value, bool if data_type == "BOOL" else str)


async def answer(models: Models, tensors: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """The one response of `generate`. Raises ApiError."""
    stream = models.stream(ENSEMBLE, tensors)
    async with aclosing(stream):
        responses = [_as_json(response) async for response in stream if _has_outputs(response)]
    if len(responses) != 1:
        raise internal(RuntimeError(f"expected one response, found {len(responses)}"))
    return responses[0]


async def events(models: Models, tensors: dict[str, NDArray[Any]]) -> AsyncGenerator[bytes, None]:
    """The events of `generate_stream`. A failure before the first one is raised, a later one is an event of its own."""
    stream = models.stream(ENSEMBLE, tensors)
    is_open = False
    try:
        async with aclosing(stream):
            async for response in stream:
                if _has_outputs(response):
                    yield event(_as_json(response))
                    is_open = True
    except ApiError as error:
        if not is_open:
            raise
        yield event(error_body(error))


def error_body(error: ApiError) -> dict[str, str]:
    """As Triton writes errors, with the names of fields that its clients send."""
    return {"error": error.engine_message}


def _has_outputs(response: triton.InferResult) -> bool:
    return len(response.get_response().outputs) > 0


def _as_json(response: triton.InferResult) -> dict[str, Any]:
    message = response.get_response()
    own = {output.name: _value(response.as_numpy(output.name)) for output in message.outputs}
    return {"model_name": message.model_name, "model_version": message.model_version, **own}


def _value(array: NDArray[Any]) -> Any:
    """A single value stands alone, as with Triton."""
    values = [item.decode(errors="replace") if isinstance(item, bytes) else item for item in array.ravel().tolist()]
    return values[0] if len(values) == 1 else values
