"""Errors as OpenAI's API words them, and what gRPC errors mean to a client."""

from __future__ import annotations

import logging
import re
from typing import Any

import grpc

from dspark_trt.serving.failures import describe_failure
from dspark_trt.serving.limits import retry_after_s
from dspark_trt.serving.worker import STOPPING

logger = logging.getLogger(__name__)

# Field of the engine's refusals -> what it is called here.
_OPENAI_NAMES = {"stop_words": "stop", "return_log_probs": "logprobs", "text_input": "prompt", "end_id": "ignore_eos"}
_ENSEMBLE_PREFIX = "in ensemble 'ensemble', "
_CANCELLED = "the request was cancelled"
# How a RequestError begins: with the field, or with what of the request it speaks of.
_REFUSAL = re.compile(
    r"unknown fields? |[a-z_]+(\[[^\]]{1,20}\])?((, | and )[a-z_]+)*: |(token ids|request id): |"
    r"(the (text|tokenizer|chat template)|this model) "
)
_UNLOADED = re.compile(r"has no available versions|is not ready")  # Triton, while it starts or stops
_UNREACHABLE = "the engine cannot be reached at the moment; retry after 1 s"


class ApiError(Exception):
    """A request that is not answered, and why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        engine_message: str | None = None,
    ) -> None:
        """`engine_message`: where that differs, the same with the engine's names of fields."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.engine_message = engine_message or message

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


def refused(param: str, message: str) -> ApiError:
    """The value of one field is not acceptable."""
    return ApiError(400, f"{param}: {message}", param=param)


def of_engine(code: grpc.StatusCode, details: str) -> ApiError:
    """What a gRPC error of the models is to a client."""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _with_openai_name(details)
    if code is grpc.StatusCode.UNAVAILABLE and not _is_ours(details) and not details.startswith("timeout_ms:"):
        logger.warning(
            "the engine cannot be reached: %s", details
        )  # names addresses, which are not a client's business
        return _unavailable(_UNREACHABLE)
    return of_text(details)


def of_text(text: str) -> ApiError:
    """The same for an error within a stream, which comes without a code.

    Triton can be asked for one there (`triton_grpc_error`), but 2.51 then ends with a fault of memory sooner or later.
    """
    text = text.removeprefix(_ENSEMBLE_PREFIX)
    if text.startswith("timeout_ms: the request did not end"):
        return timed_out(text)
    if _is_ours(text):
        return _unavailable(text)
    if _UNLOADED.search(text):
        return _unavailable(_UNREACHABLE)
    if text.startswith("internal error "):  # an id of the engine's, by which its log has the rest
        return ApiError(500, text, kind="server_error", code="internal_error")
    if _REFUSAL.match(text):
        return _with_openai_name(text)
    return internal(RuntimeError(text))  # Triton's own: no words for a client


def _is_ours(text: str) -> bool:
    """Whether the engine says that it does not answer now."""
    return text in (STOPPING, _CANCELLED) or retry_after_s(text) is not None


def _unavailable(message: str) -> ApiError:
    headers = {"Retry-After": str(retry_after_s(message) or 1)}
    return ApiError(503, message, kind="overloaded_error", code="unavailable", headers=headers)


def internal(error: BaseException) -> ApiError:
    """A failure of ours: logged in full, answered with an id."""
    message = describe_failure("the front end failed", error)
    return ApiError(500, message, kind="server_error", code="internal_error")


def timed_out(message: str) -> ApiError:
    """Clients retry server errors by themselves, but the same request would take as long again."""
    return ApiError(
        504, message, kind="timeout_error", param="timeout_ms", code="timeout", headers={"x-should-retry": "false"}
    )


def _with_openai_name(details: str) -> ApiError:
    place, colon, rest = details.partition(":")
    name, bracket, index = place.partition("[")
    if not colon or not name.isidentifier():
        return ApiError(400, details)
    param = _OPENAI_NAMES.get(name, name)
    return ApiError(400, f"{param}{bracket}{index}:{rest}", param=param, engine_message=details)
