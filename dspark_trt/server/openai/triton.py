"""gRPC to the models of one build: tokens from texts, a stream of pieces for each sequence, stops, probes.

The front end asks the engine model itself, not the ensemble: cancelling reaches a running request there, and its
responses carry token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from dspark_trt.packaging.signature import ENSEMBLE, PREPROCESSING
from dspark_trt.server.openai.errors import ApiError, of_engine, of_text
from dspark_trt.serving.fields import Tensors

_CHANNEL = [  # the server may be started again: look for it soon
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),  # our own server is behind no proxy
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
_OUTPUTS = (
    "output_ids",
    "text",
    "handle",
    "finish_reason",
    "num_steps",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "num_cached_tokens",
)
_PROBE = {
    "text_input": np.array([[b"probe"]], dtype=np.object_),
    "max_tokens": np.ones((1, 1), np.int32),
    "probe": np.ones((1, 1), np.bool_),
}
_PROBE_TIMEOUT_S = 5.0
_PROBE_INTERVAL_S = 1.0
_STOP_TIMEOUT_S = 10.0

Alternatives = tuple[tuple[int, float], ...]  # token id and log probability, most probable first


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step made for one sequence."""

    token_ids: tuple[int, ...]
    text: str
    log_probs: tuple[float, ...]
    top_log_probs: tuple[Alternatives, ...]  # of each token, where they were asked for
    finish_reason: str  # empty before the last piece, as the following are 0
    num_steps: int
    num_drafts_verified: int
    num_drafts_accepted: int
    num_cached_tokens: int = 0  # of the prompt


class Models:
    """One channel to the server, for all requests; made within a running event loop."""

    def __init__(self, grpc_address: str, engine_model_name: str) -> None:
        self._client = triton.InferenceServerClient(grpc_address, channel_args=_CHANNEL)
        self._engine = engine_model_name
        self._background: set[asyncio.Task[None]] = set()
        self._probing = asyncio.Lock()
        self._probed_at = -_PROBE_INTERVAL_S
        self._is_ready = False

    async def close(self) -> None:
        await self._client.close()

    async def preprocess(self, tensors: Tensors) -> triton.InferResult:
        """Raises ApiError, with the refusal of the model."""
        try:
            return await self._client.infer(PREPROCESSING, _inputs(tensors))
        except InferenceServerException as error:
            code = getattr(grpc.StatusCode, str(error.status()).removeprefix("StatusCode."), grpc.StatusCode.UNKNOWN)
            raise of_engine(code, error.message() or "") from None

    async def generate(
        self, tensors: Tensors, request_id: str, *, num_log_probs: int | None
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of one sequence. A caller that closes the iterator early ends the request in the engine too.

        `request_id` must be unguessable: it names the request to be stopped. Raises ApiError.
        """
        of_tokens = () if num_log_probs is None else ("output_log_probs",)
        outputs = (*_OUTPUTS, *of_tokens, *(("top_token_ids", "top_log_probs") if num_log_probs else ()))
        handle: int | None = None
        is_over = False
        stream = self.stream(self._engine, tensors, outputs=outputs, request_id=request_id)
        try:
            async with contextlib.aclosing(stream):
                async for result in stream:
                    if handle is None:
                        handle = int(result.as_numpy("handle").item())
                    piece = _piece(result, num_log_probs)
                    is_over = bool(piece.finish_reason)
                    yield piece
            if not is_over:
                raise of_engine(grpc.StatusCode.UNAVAILABLE, "the stream ended before the answer did")
        except ApiError:
            is_over = True
            raise
        finally:
            if not is_over:
                self._in_background(self._stop(handle, request_id))

    async def stream(
        self, model_name: str, tensors: Tensors, *, outputs: Sequence[str] | None = None, request_id: str = ""
    ) -> AsyncGenerator[triton.InferResult, None]:
        """The responses of one request; closing the iterator cancels it. Raises ApiError."""

        async def requests() -> AsyncGenerator[dict[str, Any], None]:
            wanted = outputs and [triton.InferRequestedOutput(name) for name in outputs]
            yield {"model_name": model_name, "inputs": _inputs(tensors), "outputs": wanted, "request_id": request_id}

        call = self._client.stream_infer(requests())
        try:
            async for result, error in call:
                if error is not None:
                    raise of_text(error.message() or "")
                yield result
        except grpc.RpcError as error:
            raise of_engine(error.code(), error.details() or "") from None
        finally:
            call.cancel()  # nothing where it is over

    async def is_ready(self) -> bool:
        """Whether a request passes through all models now. Asked at most once a second, however many ask."""
        async with self._probing:
            if time.monotonic() - self._probed_at >= _PROBE_INTERVAL_S:
                self._is_ready = await self._probe()
                self._probed_at = time.monotonic()
            return self._is_ready

    async def _probe(self) -> bool:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                return [True async for _ in self.stream(ENSEMBLE, _PROBE)] != []
        except (ApiError, TimeoutError):
            return False

    async def _stop(self, handle: int | None, request_id: str) -> None:
        """Beside the cancelled call, of which the engine may learn later: it asks for its clients now and then."""
        unused = np.ones((1, 1), np.int32)
        tensors = {
            "stop": np.array([[True]]),
            **dict.fromkeys(("input_ids", "input_lengths", "request_output_len"), unused),
        }
        if handle is not None:
            tensors["stop_handle"] = np.array([[handle]], np.int64)
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                async for _ in self.stream(self._engine, tensors, request_id=request_id):
                    pass

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _inputs(tensors: Tensors) -> list[triton.InferInput]:
    return [_input(name, array) for name, array in tensors.items()]


def _input(name: str, array: NDArray[Any]) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def _piece(result: triton.InferResult, num_log_probs: int | None) -> Piece:
    finish_reason = result.as_numpy("finish_reason").item().decode()

    def at_the_end(name: str) -> int:
        return int(result.as_numpy(name).item()) if finish_reason else 0  # 0 before, anyhow: not worth reading

    return Piece(
        token_ids=tuple(result.as_numpy("output_ids").ravel().tolist()),
        text=result.as_numpy("text").item().decode(),
        log_probs=() if num_log_probs is None else tuple(result.as_numpy("output_log_probs").ravel().tolist()),
        top_log_probs=_alternatives(result) if num_log_probs else (),
        finish_reason=finish_reason,
        num_steps=at_the_end("num_steps"),
        num_drafts_verified=at_the_end("total_draft_tokens"),
        num_drafts_accepted=at_the_end("total_accepted_draft_tokens"),
        num_cached_tokens=at_the_end("num_cached_tokens"),
    )


def _alternatives(result: triton.InferResult) -> tuple[Alternatives, ...]:
    ids, log_probs = (result.as_numpy(name)[0].tolist() for name in ("top_token_ids", "top_log_probs"))
    return tuple(tuple(zip(*of_token, strict=True)) for of_token in zip(ids, log_probs, strict=True))
