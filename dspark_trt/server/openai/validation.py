"""A body as a request, or a refusal that names what is wrong with it."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from dspark_trt.server.openai.errors import ApiError
from dspark_trt.server.openai.requests import GenerationFields
from dspark_trt.serving.limits import shorten

Request = TypeVar("Request", bound=GenerationFields)


def read_request(kind: type[Request], body: dict[str, Any], model_name: str) -> Request:
    """Raises ApiError that names the first field which is not acceptable, or the model that is not here."""
    for name in body:
        if not name.isascii():  # half a character is no text for pydantic, which then names no field
            raise ApiError(400, f"unknown field {shorten(name)}", code="unknown_parameter")
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None
    if request.model is not None and request.model != model_name:
        raise unknown_model(request.model, model_name)
    return request


def unknown_model(found: str, model_name: str) -> ApiError:
    return ApiError(
        404,
        f"the model {shorten(found)} does not exist; this server has {model_name!r}",
        kind="not_found_error",
        param="model",
        code="model_not_found",
    )


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    param = next((part for part in first["loc"] if isinstance(part, str)), None)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][:2]).lstrip(".")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {shorten(place)}", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{place}: a required field is missing", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if param is None:  # of a check of several fields, which begins with the name of one
        return ApiError(400, message, param=message.partition(":")[0])
    found = "" if first["type"] == "value_error" else f", found {shorten(first['input'])}"
    return ApiError(400, f"{param}: {message}{found}", param=param, code="invalid_value")
