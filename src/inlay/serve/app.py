"""The routes."""

from __future__ import annotations

import asyncio
from time import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from inlay import __version__
from inlay.errors import UsageError, nearest
from inlay.runtime.request import Closed, Full
from inlay.serve import convert
from inlay.serve.errors import ApiError, draining, overloaded
from inlay.serve.forms import ChatForm, CompletionForm
from inlay.serve.front import Front
from inlay.serve.kv_routes import add_kv_routes
from inlay.serve.replies import Answers, Stream, Whole
from inlay.serve.schema import ChatCompletion, ChatRequest, Completion, CompletionRequest, Model, Models, Refusal

if TYPE_CHECKING:
    from inlay.runtime.request import Answer
    from inlay.serve.serving import Serving

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": Refusal}, "5XX": {"model": Refusal}}
REASONS = dict.fromkeys(
    ("union_tag_invalid", "union_tag_not_found"), "its role must be system, developer, user or assistant"
)
"""For what pydantic says in words of its own."""
UNREAD: dict[type[BaseException], str] = {
    UnicodeDecodeError: "its bytes are not UTF-8",
    RecursionError: "it is nested too deeply",
    ValueError: "a number has too many digits",
}
"""What json says in words of its own."""
LONGEST_ECHO = 128
"""Characters of what a client wrote that stand in an error."""
METRICS = "text/plain; version=0.0.4; charset=utf-8"


def application(serving: Serving) -> Front:
    """The server as an ASGI application."""
    app = FastAPI(title="Inlay", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _failed)
    _about(app, serving)
    _answering(app, serving)
    if serving.settings.kv_routes:
        add_kv_routes(app, serving, ERRORS)
    return Front(app, serving)


def _about(app: FastAPI, serving: Serving) -> None:
    """Routes that say how things stand."""
    model = Model(id=serving.settings.name, created=serving.created, max_model_len=serving.engine.room)

    @app.get("/healthz", response_class=PlainTextResponse, responses=ERRORS)
    async def healthz() -> PlainTextResponse:
        """Whether the process runs."""
        return PlainTextResponse("ok\n")

    @app.get("/readyz", response_class=PlainTextResponse, responses=ERRORS)
    async def readyz() -> PlainTextResponse:
        """Whether requests are taken."""
        if serving.draining:
            raise draining()
        return PlainTextResponse("ready\n")

    @app.get("/metrics", response_class=PlainTextResponse, responses=ERRORS)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(serving.metrics.text(), media_type=METRICS)

    @app.get("/v1/models", response_model=Models, responses=ERRORS)
    async def models() -> Models:
        """The model that can be asked."""
        return Models(data=[model])

    @app.get("/v1/models/{name:path}", response_model=Model, responses=ERRORS)
    async def one_model(name: str) -> Model:
        """One model."""
        _check_model(name, serving)
        return model


def _answering(app: FastAPI, serving: Serving) -> None:
    """Routes that ask the model."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    streamed = {"text/event-stream": {"schema": event}}

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses={**ERRORS, 200: {"content": streamed}})
    async def chat(asked: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _reply(asked, request, serving)

    @app.post("/v1/completions", response_model=Completion, responses={**ERRORS, 200: {"content": streamed}})
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await _reply(asked, request, serving)


async def _reply(asked: ChatRequest | CompletionRequest, request: Request, serving: Serving) -> Response:
    _check_model(asked.model, serving)
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
    state, choices = request.scope["state"], asked.n or 1
    prompts = await convert.encode(asked, serving.engine.text, serving.bounds)
    wanted = convert.requests(asked, prompts, serving.bounds, state["tenant"], state["tenant"] or state["record"].id)
    if len(wanted) > serving.places.share:
        message = f"These are {len(wanted)} answers, and one request may have {serving.places.share} at once."
        raise ApiError(400, message, param="n" if choices > 1 else "prompt")
    state["place"].more(len(wanted) - 1)
    answers = Answers(_submit(wanted, serving), choices, state["record"])
    chat = isinstance(asked, ChatRequest)
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{state['record'].id}",
        "created": int(time()),
        "model": serving.settings.name,
        "system_fingerprint": serving.fingerprint,
    }
    with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
    spelling = None if wanted[0].logprobs is None else serving.spelling
    form = (ChatForm if chat else CompletionForm)(head, spelling, with_usage)
    seconds = serving.settings.write_seconds
    return Stream(answers, form, seconds, with_usage) if asked.stream else Whole(answers, form, seconds)


def _submit(wanted: list[Any], serving: Serving) -> list[Answer]:
    """Ask for all of them, or none."""
    answers: list[Answer] = []
    loop = asyncio.get_running_loop()
    try:
        answers.extend(serving.engine.submit(each, loop) for each in wanted)
    except UsageError as error:
        for answer in answers:
            answer.cancel()
        if isinstance(error, Full):
            raise overloaded(error.seconds) from error
        if isinstance(error, Closed):
            raise draining() from error
        raise ApiError(400, str(error)) from error
    return answers


def _check_model(name: str, serving: Serving) -> None:
    if name != serving.settings.name:
        message = f"The model {name[:LONGEST_ECHO]!r} is not here; {serving.settings.name!r} is."
        raise ApiError(404, message, param="model", code="model_not_found")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    unread = UNREAD.get(type(error.__cause__)) if error.__cause__ is not None else None
    if unread is not None:
        error = ApiError(400, f"The request is not JSON: {unread}.")
    elif not isinstance(error, ApiError):
        error = ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path[:LONGEST_ECHO]}.")
    record = request.scope["state"]["record"]
    record.error = record.error or error.brief
    return Response(error.body(), error.status_code, dict(error.headers or {}), "application/json")


async def _invalid(request: Request, error: Exception) -> Response:
    """The first field that is wrong; of several forms a field may have, the one it comes nearest to."""
    assert isinstance(error, RequestValidationError)
    found = [(_place(each["loc"]), each) for each in error.errors()]
    first = found[0][0][:1]
    place, worst = max((each for each in found if each[0][:1] == first), key=_nearness)
    name = ".".join(map(str, place))[:LONGEST_ECHO]
    reason = REASONS.get(worst["type"], str(worst["msg"]))
    if place[-1:] == ("type",) and "content" in place:
        reason = "this model reads parts of type text only"
    if worst["type"] == "json_invalid":
        said = str(worst["ctx"]["error"]).removesuffix(" at").removesuffix(" starting")
        refusal = ApiError(400, f"The request is not JSON: {said}, at character {place[-1]}.")
    elif worst["type"] == "missing" and not place:
        refusal = ApiError(400, "The request is empty. Send a JSON object, with Content-Type: application/json.")
    elif worst["type"] == "model_attributes_type" and not place:
        refusal = ApiError(400, "The request is not a JSON object. Send one, with Content-Type: application/json.")
    elif worst["type"] == "extra_forbidden":
        known = [*ChatRequest.model_fields, *CompletionRequest.model_fields]
        hint = nearest(str(place[-1]), known) or "Leave it out."
        refusal = ApiError(400, f"This route does not know {name}. {hint}", param=name, code="unknown_parameter")
    else:
        refusal = ApiError(400, f"{name or 'The request'}: {reason}.", param=name or None)
    return await _refused(request, refusal)


def _nearness(found: tuple[tuple[str | int, ...], Any]) -> tuple[int, bool]:
    place, error = found
    return len(place), not error["type"].endswith("_type")


async def _failed(request: Request, error: Exception) -> Response:
    return await _refused(request, ApiError(500, "This server failed where it should not.", code="internal_error"))


def _place(loc: tuple[Any, ...]) -> tuple[str | int, ...]:
    """Where a field is, without the names of the types it was tried as."""
    types = ("str", "system", "developer", "user", "assistant")
    return tuple(
        each
        for at, each in enumerate(loc[1:])
        if isinstance(each, int) or at == 0 or (each.isidentifier() and each not in types)
    )
