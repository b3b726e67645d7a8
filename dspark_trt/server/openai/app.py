"""The routes of the front end."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from dspark_trt.server.openai import generate
from dspark_trt.server.openai.answers import Answering, Format, Header
from dspark_trt.server.openai.body import BodyMemory, read_json_object
from dspark_trt.server.openai.chat import ChatFormat
from dspark_trt.server.openai.completions import CompletionFormat
from dspark_trt.server.openai.errors import ApiError, ClientGoneError, internal
from dspark_trt.server.openai.jobs import Prompt, chat_prompt, completion_prompt, make_jobs, timeout_s
from dspark_trt.server.openai.live import Metrics
from dspark_trt.server.openai.pieces import run
from dspark_trt.server.openai.requests import ChatRequest, CompletionRequest
from dspark_trt.server.openai.responses import EventStream, first_event, while_connected
from dspark_trt.server.openai.settings import FrontEndSettings
from dspark_trt.server.openai.triton import Models
from dspark_trt.server.openai.validation import read_request, unknown_model
from dspark_trt.text import TextCodec

_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_CLIENT_GONE = 499  # as nginx calls it; nobody reads it


class FrontEnd:
    """What the routes share. Made within the running event loop."""

    def __init__(self, settings: FrontEndSettings) -> None:
        self.settings = settings
        self.models = Models(settings.grpc_address, settings.engine_model_name)
        self.metrics = Metrics(settings.metrics_url)
        self.started_at = int(time.time())
        self._body_memory = BodyMemory(settings.max_body_bytes)
        self._codec = TextCodec.load(settings.tokenizer_folder)

    async def read_body(self, http: Request) -> dict[str, Any]:
        return await read_json_object(http, self.settings.max_body_bytes, self._body_memory)

    def decode(self, token_ids: Any) -> str:
        return self._codec.decode(token_ids, skip_special_tokens=False)

    async def chat(self, body: dict[str, Any]) -> tuple[ChatRequest, list[Prompt], Format]:
        request = read_request(ChatRequest, body, self.settings.model_name)
        prompt = await chat_prompt(request, self.models)
        return request, [prompt], ChatFormat(self.decode, request.num_log_probs)

    async def completion(self, body: dict[str, Any]) -> tuple[CompletionRequest, list[Prompt], Format]:
        request = read_request(CompletionRequest, body, self.settings.model_name)
        given, max_seq_len = request.prompts, self.settings.max_seq_len
        prompts = [await completion_prompt(prompt, request, self.models, max_seq_len) for prompt in given]
        texts = [prompt if isinstance(prompt, str) else self.decode(prompt) for prompt in given]
        echoed = [text if request.echo else "" for text in texts for _ in range(request.n)]
        return request, prompts, CompletionFormat(self.decode, request.num_log_probs, echoed)

    async def answer(self, http: Request, read: Callable[..., Any]) -> Response:
        """Answer a request of either kind; `read` is `chat` or `completion`."""
        body = await self.read_body(http)
        request, prompts, form = await while_connected(http, read(body))
        jobs = make_jobs(request, prompts, self.settings)
        pieces = run(self.models, jobs, timeout_s(request, self.settings))
        header = Header.new(form.id_prefix, self.settings.model_name)
        answering = Answering(form, header, prompts, len(jobs), self.settings.gamma, request.includes_usage)
        if not request.stream:
            return JSONResponse(await while_connected(http, answering.whole(pieces)))
        events = answering.events(pieces)
        return EventStream(await while_connected(http, first_event(events)), events)


def make_app(settings: FrontEndSettings) -> FastAPI:
    """The application for one build that is served."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        app.state.front_end = FrontEnd(settings)
        yield
        await app.state.front_end.models.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(ClientGoneError, _answer_nobody)
    app.add_exception_handler(HTTPException, _answer_unknown_route)
    app.add_exception_handler(Exception, _answer_failure)
    _add_openai(app)
    _add_operations(app)
    _add_generate(app)
    return app


def _front_end(http: Request) -> FrontEnd:
    front_end: FrontEnd = http.app.state.front_end
    return front_end


def _add_openai(app: FastAPI) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        front_end = _front_end(http)
        return await front_end.answer(http, front_end.chat)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        front_end = _front_end(http)
        return await front_end.answer(http, front_end.completion)

    def model(front_end: FrontEnd) -> dict[str, Any]:
        settings = front_end.settings
        return {
            "id": settings.model_name,
            "object": "model",
            "created": front_end.started_at,
            "owned_by": "dspark-trt",
            "max_model_len": settings.max_seq_len,
        }

    @app.get("/v1/models")
    async def models(http: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model(_front_end(http))]})

    @app.get("/v1/models/{name:path}")
    async def one_model(http: Request, name: str) -> JSONResponse:
        front_end = _front_end(http)
        if name != front_end.settings.model_name:
            raise unknown_model(name, front_end.settings.model_name)
        return JSONResponse(model(front_end))


def _add_operations(app: FastAPI) -> None:
    @app.get("/health")
    @app.get("/v2/health/ready")
    async def health(http: Request) -> JSONResponse:
        is_ready = await _front_end(http).models.is_ready()
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    @app.get("/v2/health/live")
    async def alive() -> JSONResponse:
        return JSONResponse({"status": "alive"})

    @app.get("/metrics")
    async def metrics(http: Request) -> PlainTextResponse:
        text = await _front_end(http).metrics.text()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/live")
    async def live(http: Request) -> JSONResponse:
        front_end = _front_end(http)
        now = await front_end.metrics.live()
        return JSONResponse({"model": front_end.settings.model_name, "ready": await front_end.models.is_ready(), **now})

    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/")
    async def live_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})


def _add_generate(app: FastAPI) -> None:
    @app.post("/v2/models/ensemble/generate")
    async def generate_once(http: Request) -> JSONResponse:
        front_end = _front_end(http)
        try:
            body = await front_end.read_body(http)
            tensors = generate.read_fields(body, streams=False)
            return JSONResponse(await while_connected(http, generate.answer(front_end.models, tensors)))
        except ApiError as error:
            return JSONResponse(generate.error_body(error), error.status, error.headers)

    @app.post("/v2/models/ensemble/generate_stream")
    async def generate_stream(http: Request) -> Response:
        front_end = _front_end(http)
        try:
            body = await front_end.read_body(http)
            events = generate.events(front_end.models, generate.read_fields(body, streams=True))
            return EventStream(await while_connected(http, first_event(events)), events)
        except ApiError as error:
            return JSONResponse(generate.error_body(error), error.status, error.headers)


async def _answer_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for these"
    return JSONResponse(error.body(), error.status, error.headers)


async def _answer_nobody(http: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE, headers={"connection": "close"})


async def _answer_unknown_route(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    message = f"{http.method} {http.url.path[:200]}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message, kind=kind).body(), error.status_code, error.headers)


async def _answer_failure(http: Request, error: Exception) -> Response:
    return await _answer_error(http, internal(error))
