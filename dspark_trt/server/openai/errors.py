"""Errors as OpenAI's API words them, and what gRPC errors mean to a client."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from dspark_trt.serving.failures import describe_failure
from dspark_trt.serving.limits import retry_after_s
from dspark_trt.serving.worker import STOPPING

logger = logging.getLogger(__name__)

# Field of the engine's refusals -> what it is called here.
_OPENAI_NAMES = {"stop_words": "stop", "return_log_probs": "logprobs", "text_input": "prompt", "end_id": "ignore_eos"}
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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

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
    if code is grpc.StatusCode.UNAVAILABLE:
        if details.startswith("timeout_ms:"):
            return timed_out(details)
        retry = retry_after_s(details)
        if details == STOPPING or retry is not None:
            headers = {"Retry-After": str(retry or 1)}
            return ApiError(503, details, kind="overloaded_error", code="unavailable", headers=headers)
        logger.warning(
            "the engine cannot be reached: %s", details
        )  # names addresses, which are not a client's business
        return ApiError(503, _UNREACHABLE, kind="server_error", code="unavailable", headers={"Retry-After": "1"})
    if code is grpc.StatusCode.CANCELLED:
        return ApiError(503, "the request was stopped", kind="server_error", code="cancelled")
    if details.startswith("internal error "):  # an id of the engine's, by which its log has the rest
        return ApiError(500, details, kind="server_error", code="internal_error")
    return internal(RuntimeError(f"{code}: {details}"))


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
    name, colon, rest = details.partition(":")
    if not colon or not name.isidentifier():
        return ApiError(400, details)
    param = _OPENAI_NAMES.get(name, name)
    return ApiError(400, f"{param}:{rest}", param=param)
