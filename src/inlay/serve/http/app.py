"""The ASGI application: routes and error handlers."""

from __future__ import annotations

import asyncio
from time import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from inlay._version import __version__
from inlay.errors import UsageError, suggest
from inlay.runtime.request import EngineClosedError, QueueFullError
from inlay.serve.http import request_builder
from inlay.serve.http.answer_form import AnswerForm, read_grammar
from inlay.serve.http.embeddings import EncoderEngine, add_embedding_route
from inlay.serve.http.errors import LONGEST_ECHO, ApiError, draining_error, overloaded_error
from inlay.serve.http.middleware import RequestMiddleware
from inlay.serve.http.response_schema import ChatResponse, CompletionResponse, ErrorResponse, ModelCard, Models
from inlay.serve.http.responses import EventStreamResponse, FullResponse, HandleGroup
from inlay.serve.http.router_routes import add_info_routes, add_tokenizer_routes
from inlay.serve.http.schema import ChatRequest, CompletionRequest
from inlay.serve.http.serializers import ChatSerializer, CompletionSerializer, PromptForm, ResponseSerializer
from inlay.serve.kv_events.json_feed import add_kv_routes

if TYPE_CHECKING:
    from inlay.runtime.request import RequestHandle
    from inlay.serve.http.server_context import ServerContext

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}}
ROLE_ERRORS = ("union_tag_invalid", "union_tag_not_found")
"""pydantic's errors for a message with an unknown role."""
JSON_ERRORS: dict[type[BaseException], str] = {
    UnicodeDecodeError: "its bytes are not UTF-8",
    RecursionError: "it is nested too deeply",
    ValueError: "a number has too many digits",
}
"""Reasons that replace messages of the json module, by exception type."""
METRICS = "text/plain; version=0.0.4; charset=utf-8"


def create_app(context: ServerContext) -> RequestMiddleware:
    """Return the server as an ASGI application."""
    app = FastAPI(title="Inlay", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(Exception, _handle_internal_error)
    _add_status_routes(app, context)
    if isinstance(context.engine, EncoderEngine):
        add_embedding_route(app, context, context.engine, ERRORS)
        return RequestMiddleware(app, context)
    _add_generation_routes(app, context)
    add_tokenizer_routes(app, context, ERRORS)
    add_info_routes(app, context, ERRORS)
    if context.settings.kv_routes:
        add_kv_routes(app, context, ERRORS)
    return RequestMiddleware(app, context)


def _add_status_routes(app: FastAPI, serving: ServerContext) -> None:
    """Add the routes for health, readiness, metrics and models."""
    model = ModelCard(id=serving.settings.name, created=serving.created, max_model_len=serving.engine.max_seq_len)

    @app.get("/healthz", response_class=PlainTextResponse, responses=ERRORS)
    async def healthz() -> PlainTextResponse:
        """Liveness: the process runs."""
        return PlainTextResponse("ok\n")

    @app.get("/health", response_class=PlainTextResponse, responses=ERRORS)
    @app.get("/readyz", response_class=PlainTextResponse, responses=ERRORS)
    async def readyz() -> PlainTextResponse:
        """Readiness: the server accepts requests."""
        if serving.is_draining:
            raise draining_error()
        return PlainTextResponse("ready\n")

    @app.get("/metrics", response_class=PlainTextResponse, responses=ERRORS)
    async def metrics() -> Response:
        """Metrics in Prometheus text format."""
        return Response(await serving.metrics_page(), media_type=METRICS)

    @app.get("/v1/models", response_model=Models, responses=ERRORS)
    async def models() -> Models:
        """List the served model."""
        return Models(data=[model])

    @app.get("/v1/models/{name:path}", response_model=ModelCard, responses=ERRORS)
    async def one_model(name: str) -> ModelCard:
        """Describe the served model."""
        serving.check_model(name)
        return model


def _add_generation_routes(app: FastAPI, serving: ServerContext) -> None:
    """Add the chat and text completion routes."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    streamed = {"text/event-stream": {"schema": event}}

    @app.post("/v1/chat/completions", response_model=ChatResponse, responses={**ERRORS, 200: {"content": streamed}})
    async def chat(asked: ChatRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        return await _reply(asked, request, serving)

    @app.post("/v1/completions", response_model=CompletionResponse, responses={**ERRORS, 200: {"content": streamed}})
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        """Generate the continuation of a prompt."""
        return await _reply(asked, request, serving)


async def _reply(asked: ChatRequest | CompletionRequest, request: Request, serving: ServerContext) -> Response:
    serving.check_model(asked.model)
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options requires stream to be true.", param="stream_options")
    state, choices = request.scope["state"], asked.n or 1
    text, limits = serving.engine.text, serving.limits
    prompts = await request_builder.encode(asked, text, limits)
    form = AnswerForm.of(asked, prompts, text)
    grammar = await read_grammar(asked, form, text)
    given = (limits, state["record"].id, state["tenant"], form, grammar)
    wanted = request_builder.build_requests(asked, prompts, *given)
    if len(wanted) > serving.admission.share:
        message = f"The request has {len(wanted)} completions, but the limit is {serving.admission.share} per request."
        raise ApiError(400, message, param="n" if choices > 1 else "prompt")
    state["place"].acquire(len(wanted) - 1)
    answers = HandleGroup(_submit(wanted, serving), choices, state["record"])
    chat = isinstance(asked, ChatRequest)
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{state['record'].id}",
        "created": int(time()),
        "model": serving.settings.name,
        "system_fingerprint": serving.fingerprint,
    }
    with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
    spelling = None if wanted[0].logprobs is None else serving.token_text
    serializer: ResponseSerializer = ChatSerializer(head, spelling, with_usage, form)
    if isinstance(asked, CompletionRequest):
        texts = request_builder.prompt_texts(asked, prompts, text)
        echo = [(texts[index // choices], each.prompt) for index, each in enumerate(wanted)] if asked.echo else None
        serializer = CompletionSerializer(head, spelling, with_usage, echo)
    if asked.prompt_logprobs is not None:
        serializer.prompt_form = PromptForm([each.prompt for each in wanted], serving.token_text, asked.prompt_logprobs)
    seconds = serving.settings.write_seconds
    if asked.stream:
        return EventStreamResponse(answers, serializer, seconds, with_usage)
    return FullResponse(answers, serializer, seconds)


def _submit(wanted: list[Any], serving: ServerContext) -> list[RequestHandle]:
    """Submit all requests to the engine, or none."""
    answers: list[RequestHandle] = []
    loop = asyncio.get_running_loop()
    try:
        answers.extend(serving.engine.submit(each, loop) for each in wanted)
    except UsageError as error:
        for answer in answers:
            answer.cancel()
        if isinstance(error, QueueFullError):
            raise overloaded_error(error.retry_after) from error
        if isinstance(error, EngineClosedError):
            raise draining_error() from error
        raise ApiError(400, str(error)) from error
    return answers


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    unread = JSON_ERRORS.get(type(error.__cause__)) if error.__cause__ is not None else None
    if unread is not None:
        error = ApiError(400, f"The request body is not valid JSON: {unread}.")
    elif not isinstance(error, ApiError):
        error = ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path[:LONGEST_ECHO]}.")
    record = request.scope["state"]["record"]
    record.error = record.error or error.brief
    return Response(error.body(), error.status_code, dict(error.headers or {}), "application/json")


async def _handle_validation_error(request: Request, error: Exception) -> Response:
    """Report the first invalid field. Where a field may have several types, report the error of the closest one."""
    assert isinstance(error, RequestValidationError)
    found = [(_field_path(each["loc"]), each) for each in error.errors()]
    first = found[0][0][:1]
    place, worst = max((each for each in found if each[0][:1] == first), key=_nearness)
    name = ".".join(map(str, place))[:LONGEST_ECHO]
    reason = str(worst["msg"])
    if place[:1] == ("messages",) and worst["type"] in ROLE_ERRORS:
        reason = "its role must be system, developer, user, assistant or tool"
    elif place[-1:] == ("type",) and "content" in place:
        reason = "only content parts of type text are supported"
    if worst["type"] == "json_invalid":
        said = str(worst["ctx"]["error"]).removesuffix(" at").removesuffix(" starting")
        refusal = ApiError(400, f"The request body is not valid JSON: {said}, at character {place[-1]}.")
    elif worst["type"] == "missing" and not place:
        refusal = ApiError(400, "The request body is empty. Send a JSON object, with Content-Type: application/json.")
    elif worst["type"] == "model_attributes_type" and not place:
        message = "The request body is not a JSON object. Send one, with Content-Type: application/json."
        refusal = ApiError(400, message)
    elif worst["type"] == "extra_forbidden":
        known = [*ChatRequest.model_fields, *CompletionRequest.model_fields]
        hint = suggest(str(place[-1]), known) or "Leave it out."
        refusal = ApiError(400, f"Unknown parameter {name}. {hint}", param=name, code="unknown_parameter")
    else:
        refusal = ApiError(400, f"{name or 'The request'}: {reason}.", param=name or None)
    return await _handle_http_error(request, refusal)


def _nearness(found: tuple[tuple[str | int, ...], Any]) -> tuple[int, bool]:
    place, error = found
    return len(place), not error["type"].endswith("_type")


async def _handle_internal_error(request: Request, error: Exception) -> Response:
    return await _handle_http_error(request, ApiError(500, "Internal server error.", code="internal_error"))


def _field_path(loc: tuple[Any, ...]) -> tuple[str | int, ...]:
    """Return the path of a field, without the names of the union members that pydantic tried."""
    types = ("str", "system", "developer", "user", "assistant", "tool", "NamedTool")
    return tuple(
        each
        for at, each in enumerate(loc[1:])
        if isinstance(each, int) or at == 0 or (each.isidentifier() and each not in types)
    )
