"""Routes that routers ask of an engine, with the names and fields of vLLM and SGLang.

llm-d tokenizes through `/v1/…/render`; sglang-router and vllm-router read the information and load routes.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import Request  # noqa: TC002 - FastAPI reads the annotation

from inlay._version import __version__
from inlay.serve.http import request_builder
from inlay.serve.http.answer_form import AnswerForm
from inlay.serve.http.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from fastapi import FastAPI

    from inlay.serve.http.server_context import ServerContext

TOKENIZER_ROUTES = frozenset({"/tokenize", "/detokenize", "/v1/completions/render", "/v1/chat/completions/render"})
INFO_ROUTES = frozenset({"/server_info", "/get_server_info", "/model_info", "/get_model_info", "/get_load"})


def add_tokenizer_routes(app: FastAPI, context: ServerContext, errors: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes that return tokens, and the text of tokens."""
    text, limits = context.engine.text, context.limits

    @app.post("/tokenize", responses=errors)
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        """Tokenize a text or the messages of a chat, as the generation routes do."""
        context.check_model(asked.model)
        tokens = await request_builder.encode_text(asked, text, limits)
        names = [text.tokenizer.id_to_token(each) or "" for each in tokens] if asked.return_token_strs else None
        sizes = {"count": len(tokens), "max_model_len": context.engine.max_seq_len}
        return {**sizes, "tokens": tokens, "token_strs": names}

    @app.post("/detokenize", responses=errors)
    async def detokenize(asked: DetokenizeRequest) -> dict[str, str]:
        """Return the text of tokens, special tokens included."""
        context.check_model(asked.model)
        request_builder.check_tokens(asked.tokens, limits, "tokens")
        decoded = await asyncio.to_thread(text.tokenizer.decode, asked.tokens, skip_special_tokens=False)
        return {"prompt": str(decoded)}

    @app.post("/v1/completions/render", responses=errors)
    async def render(asked: CompletionRequest, request: Request) -> list[dict[str, Any]]:
        """Return each prompt of a completion request as tokens, without running it."""
        return await _render(asked, request, context)

    @app.post("/v1/chat/completions/render", responses=errors)
    async def render_chat(asked: ChatRequest, request: Request) -> dict[str, Any]:
        """Return the prompt of a chat request as tokens, without running it."""
        (rendered,) = await _render(asked, request, context)
        return rendered


def add_info_routes(app: FastAPI, context: ServerContext, errors: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes about the server, the model and the load."""
    name, engine = context.settings.name, context.engine

    async def model_info() -> dict[str, Any]:
        """Return the model, with SGLang's field names."""
        return {"model_path": name, "served_model_name": name, "tokenizer_path": name, "is_generation": True}

    async def server_info() -> dict[str, Any]:
        """Return the model and the limits of the server, with SGLang's field names."""
        sizes = {"max_model_len": engine.max_seq_len, "context_length": engine.max_seq_len}
        limits = {"max_running_requests": engine.slots, "page_size": engine.settings.block_size, "dp_size": 1}
        return {**await model_info(), **sizes, **limits, "version": __version__, "engine": "inlay"}

    @app.get("/get_load", responses=errors)
    async def get_load() -> list[dict[str, float]]:
        """Return the number of requests and of tokens in them, with SGLang's field names."""
        now = engine.counts()
        running, waiting = now["prefill_sequences"] + now["decode_sequences"], now["waiting_requests"]
        tokens = now["running_tokens"] + now["waiting_tokens"]
        return [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": tokens}]

    for path, route in (("model_info", model_info), ("server_info", server_info)):
        app.get(f"/{path}", responses=errors, operation_id=path)(route)
        app.get(f"/get_{path}", responses=errors, operation_id=f"get_{path}")(route)


async def _render(
    asked: ChatRequest | CompletionRequest, request: Request, context: ServerContext
) -> list[dict[str, Any]]:
    context.check_model(asked.model)
    prompts = await request_builder.encode(asked, context.engine.text, context.limits)
    form = AnswerForm.of(asked, prompts, context.engine.text)
    one = asked.model_copy(update={"n": 1})
    built = request_builder.build_requests(one, prompts, context.limits, "", "", form)
    kind = "chatcmpl" if isinstance(asked, ChatRequest) else "cmpl"
    return [
        {
            "request_id": f"{kind}-{request.scope['state']['record'].id}-{index}",
            "token_ids": list(each.prompt),
            "sampling_params": {**asdict(each.sampling), "max_tokens": each.max_tokens, "stop": list(each.stop)},
            "model": asked.model,
            "stream": bool(asked.stream),
            "cache_salt": asked.cache_salt,
        }
        for index, each in enumerate(built)
    ]
