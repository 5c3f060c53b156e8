"""What a server says to requests it cannot follow: always OpenAI's form, always which field, never a 5xx."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from inlay.runtime.request import RequestHandle
from inlay.serve.http import request_builder
from inlay.serve.http.app import create_app
from inlay.serve.http.request_log import LogWriter
from inlay.serve.http.schema import ChatRequest, CompletionRequest
from inlay.serve.http.server_context import ServerContext
from inlay.serve.http.settings import ServerSettings
from inlay.serve.http.token_text import TokenText
from tests.serve.server_process import NAME
from tests.text_models import byte_tokenizer, fallback_tokenizer, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.runtime.engine import Engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "fox"}]


def call(
    engine: Engine, method: str, path: str, settings: ServerSettings | None = None, **given: Any
) -> httpx.Response:
    """One request, in this process."""

    async def send() -> httpx.Response:
        serving = ServerContext(engine, settings or ServerSettings(NAME), "fp_test", LogWriter(io.StringIO()))
        transport = httpx.ASGITransport(create_app(serving), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            response = await client.request(method, path, **given)
        assert serving.admission.active == 0
        return response

    return asyncio.run(send())


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "?"))
    return error


def _tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _called(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("path", "given", "param", "sentence"),
    [
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": "fox"}, "messages", "valid list"),
        (CHAT, {}, "messages", "required"),
        (
            CHAT,
            {"messages": [{"role": "pirate", "content": "fox"}]},
            "messages.0",
            "must be system, developer, user, assistant or tool",
        ),
        (
            CHAT,
            {"messages": [{"role": "function", "content": "fox"}]},
            "messages.0",
            "must be system, developer, user, assistant or tool",
        ),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content", "valid string"),
        (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages.0.content", "at least 1 item"),
        (CHAT, {"messages": [{"content": "fox"}]}, "messages.0", "its role must be"),
        (CHAT, {"messages": ["fox"]}, "messages.0", "dictionary"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "valid string"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
            "only content parts of type text",
        ),
        (
            CHAT,
            {"messages": [*TALK, {"role": "assistant", "tool_calls": [{}]}]},
            "messages.1.tool_calls.0.id",
            "required",
        ),
        (
            CHAT,
            {"messages": [*TALK, _called("[1]")]},
            "messages",
            "The arguments of the call of f are not a JSON object",
        ),
        (CHAT, {"messages": [*TALK, _called("{")]}, "messages", "The arguments of the call of f are not JSON"),
        (CHAT, {"messages": [*TALK, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id", "required"),
        (CHAT, {"messages": TALK, "tools": [{}]}, "tools.0.type", "required"),
        (CHAT, {"messages": TALK, "tools": [_tool("a b")]}, "tools.0.function.name", "pattern"),
        (CHAT, {"messages": TALK, "tools": [_tool("f"), _tool("f")]}, "tools", "same name"),
        (CHAT, {"messages": TALK, "tools": [_tool(f"f{at}") for at in range(129)]}, "tools", "at most 128"),
        (CHAT, {"messages": TALK, "tool_choice": "required"}, "tool_choice", "requires tools"),
        (
            CHAT,
            {"messages": TALK, "tools": [_tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "names no function",
        ),
        (CHAT, {"messages": TALK, "tools": [_tool("f")], "tool_choice": "any"}, "tool_choice", "'auto'"),
        (
            CHAT,
            {"messages": TALK, "tools": [_tool("f", {"type": 3})], "tool_choice": "required"},
            "tools",
            "The grammar cannot be used",
        ),
        (
            CHAT,
            {
                "messages": TALK,
                "tools": [_tool("f")],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
            "exclude each other",
        ),
        (
            CHAT,
            {"messages": TALK, "tools": [_tool("f")], "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "exclude each other",
        ),
        (CHAT, {"messages": TALK, "tools": [_tool("f", {"title": "\ud83e"})]}, "messages", "surrogates not allowed"),
        (CHAT, {"messages": TALK, "chat_template_kwargs": {"x": 1}}, "messages", "has no option x"),
        (
            CHAT,
            {"messages": TALK, "response_format": {"type": "structural_tag"}},
            "response_format",
            "'text', 'json_object', 'json_schema'",
        ),
        (CHAT, {"messages": TALK, "structured_outputs": {}}, "structured_outputs", "exactly one of"),
        (
            CHAT,
            {"messages": TALK, "structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "exactly",
        ),
        (CHAT, {"messages": TALK, "structured_outputs": {"regex": "(a"}}, "structured_outputs", "cannot be used"),
        (CHAT, {"messages": TALK, "structured_outputs": {"regex": "a" * 65537}}, "structured_outputs", "the limit is"),
        (
            CHAT,
            {
                "messages": TALK,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}},
            },
            "response_format",
            "The JSON schema cannot be used",
        ),
        (
            CHAT,
            {"messages": TALK, "structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "ignore_eos",
            "exclude each other",
        ),
        (CHAT, {"messages": TALK, "logit_bias": {"1": 101}}, "logit_bias", "less than or equal to 100"),
        (CHAT, {"messages": TALK, "logit_bias": {"x": 5}}, "logit_bias.x", "pattern"),
        (CHAT, {"messages": TALK, "logit_bias": {"312": 5}}, "logit_bias", "Token 312 does not exist"),
        (CHAT, {"messages": TALK, "presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        (CHAT, {"messages": TALK, "frequency_penalty": -2.5}, "frequency_penalty", "greater than or equal to -2"),
        (CHAT, {"messages": TALK, "min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens is 8"),
        (CHAT, {"messages": TALK, "modalities": ["text", "audio"]}, "modalities", "does not support it"),
        (CHAT, {"messages": TALK, "reasoning_effort": "high"}, "reasoning_effort", "no setting for the reasoning"),
        (CHAT, {"messages": TALK, "temprature": 1}, "temprature", "Did you mean temperature?"),
        (CHAT, {"messages": TALK, "temperature": 2.5}, "temperature", "less than or equal to 2"),
        (CHAT, {"messages": TALK, "temperature": "hot"}, "temperature", "valid number"),
        (CHAT, {"messages": TALK, "repetition_penalty": 5e-324}, "repetition_penalty", "0.01"),
        (CHAT, {"messages": TALK, "top_p": 0}, "top_p", "greater than 0"),
        (CHAT, {"messages": TALK, "n": 17}, "n", "less than or equal to 16"),
        (CHAT, {"messages": TALK, "n": 0}, "n", "greater than or equal to 1"),
        (CHAT, {"messages": TALK, "n": True}, "n", "valid integer"),
        (CHAT, {"messages": TALK, "seed": 2**63}, "seed", "less than"),
        (CHAT, {"messages": TALK, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (CHAT, {"messages": TALK, "max_completion_tokens": 10**6}, "max_completion_tokens", "at most 4096"),
        (CHAT, {"messages": TALK, "stop": [""]}, "stop.0", "at least 1 character"),
        (CHAT, {"messages": TALK, "stop": "x" * 257}, "stop", "at most 256"),
        (CHAT, {"messages": TALK, "top_logprobs": 2}, "top_logprobs", "requires logprobs"),
        (CHAT, {"messages": TALK, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        (CHAT, {"messages": TALK, "stream_options": {"include_usage": True}}, "stream_options", "requires stream"),
        (TEXT, {"prompt": "fox", "echo": True, "logprobs": 1, "stream": True}, "stream", "exclude each other"),
        (TEXT, {"prompt": "fox", "prompt_logprobs": 1, "stream": True}, "stream", "exclude each other"),
        (CHAT, {"messages": TALK, "prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        (TEXT, {"prompt": "fox", "suffix": "dog"}, "suffix", "does not support it"),
        (TEXT, {"prompt": "fox", "best_of": 3}, "best_of", "does not support it"),
        (TEXT, {"prompt": "fox", "logprobs": 6}, "logprobs", "less than or equal to 5"),
        (TEXT, {"prompt": []}, "prompt", "at least 1 item"),
        (TEXT, {"prompt": [1, -1]}, "prompt.1", "greater than or equal to 0"),
        (TEXT, {"prompt": [5, 312]}, "prompt", "Token 312 does not exist"),
        (TEXT, {"prompt": [[5], []]}, "prompt.1", "at least 1 item"),
        (TEXT, {"prompt": [5] * 4097}, "prompt", "4097 tokens, but the limit is 4096"),
        (TEXT, {"prompt": "fox" * 9_000}, "prompt", "tokens, but the limit is 4096"),
        (TEXT, {"prompt": "fox" * 100_000}, "prompt", "300000 characters, which is more than 4096 tokens"),
        (TEXT, {"prompt": ["x"] * 60, "n": 2}, "n", "120 completions"),
        (TEXT, {"prompt": "half a fox \ud83e"}, "prompt", "half of a character"),
        (TEXT, {"prompt": "fox", "cache_salt": "\udd8a"}, "cache_salt", "unicode"),
        (TEXT, {"prompt": "fox", "stop": ["\udd8a"]}, "stop.0", "unicode"),
    ],
)
def test_refusals(engine: Engine, path: str, given: dict[str, Any], param: str, sentence: str) -> None:
    before = engine.counts()["accepted"]
    body = json.dumps({"model": NAME, **given})
    error = refused(call(engine, "POST", path, content=body, headers={"Content-Type": "application/json"}))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert sentence in error["message"]
    assert engine.counts()["accepted"] == before, "the engine was not asked"


@pytest.mark.parametrize(
    ("content", "kind", "sentence"),
    [
        (b"", "application/json", "is empty"),
        (b"{", "application/json", "not valid JSON"),
        (b"\xff\xfe", "application/json", "not valid JSON"),
        (b'{"model": "\xff"}', "application/json", "not UTF-8"),
        (b'{"model": "a\x00"}', "application/json", "Invalid control character, at character 12."),
        (b"[]", "application/json", "not a JSON object"),
        (b"null", "application/json", "not a JSON object"),
        (b"{}", "text/plain", "Content-Type: application/json"),
        (b"{}", "", "Content-Type: application/json"),
        pytest.param(b"[" * 100_000, "application/json", "nested too deeply", id="deep"),
        pytest.param(b'{"model": ' + b"1" * 5000 + b"}", "application/json", "too many digits", id="digits"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "application/json", "finite number"),
        (b'{"model": "tiny", "prompt": "x", "temperature": 1e999}', "application/json", "finite number"),
        (b'{"model": "tiny", "prompt": "x", "\\ud800": 1}', "application/json", "unicode"),
    ],
)
def test_bodies_that_are_no_request(engine: Engine, content: bytes, kind: str, sentence: str) -> None:
    response = call(engine, "POST", TEXT, content=content, headers={"Content-Type": kind} if kind else {})
    assert sentence in refused(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/engines", 404),
        ("GET", "/docs", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/gpt-4o", 404),
        ("GET", "/v1/models/org/name", 404),
    ],
)
def test_routes_that_are_not_there(engine: Engine, method: str, path: str, status: int) -> None:
    refused(call(engine, method, path), status)


def test_what_asks_for_nothing_is_taken(engine: Engine) -> None:
    """Fields that cannot change the answer, and empty ones of those that could."""
    given = {
        "model": NAME, "messages": TALK, "max_tokens": 2, "user": "me", "metadata": {"a": "b"}, "store": True,
        "service_tier": "auto", "parallel_tool_calls": True, "tools": [], "tool_choice": "none", "logit_bias": {},
        "presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}, "modalities": ["text"],
        "stop": None, "n": None, "stream": False, "seed": None, "reasoning_effort": None, "safety_identifier": "x",
    }  # fmt: skip
    assert call(engine, "POST", CHAT, json=given).status_code == 200


def test_roles_and_parts(engine: Engine) -> None:
    """A developer is a system, parts are lines, and an assistant may have said nothing."""

    def tokens(messages: list[dict[str, Any]]) -> tuple[int, str]:
        given = {"model": NAME, "messages": messages, "max_tokens": 5, "temperature": 0}
        made = call(engine, "POST", CHAT, json=given).json()
        return made["usage"]["prompt_tokens"], made["choices"][0]["message"]["content"]

    plain = tokens([{"role": "system", "content": "a\nb"}, {"role": "assistant", "content": ""}, *TALK])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokens([{"role": "developer", "content": parts}, {"role": "assistant", "content": None}, *TALK]) == plain


def test_the_template_may_refuse(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.text.chat is not None
    monkeypatch.setattr(engine.text.chat, "source", "{{ raise_exception('only foxes') }}")
    monkeypatch.delitem(engine.text.chat.__dict__, "_compiled", raising=False)
    error = refused(call(engine, "POST", CHAT, json={"model": NAME, "messages": TALK}))
    assert "only foxes" in error["message"]
    monkeypatch.delitem(engine.text.chat.__dict__, "_compiled", raising=False)


def test_long_prompts_are_the_same_tokens(engine: Engine) -> None:
    """They are read in another way, so that others need not wait."""
    text = "Über Fuß, 你好 世界, naïve café 🦊. <end> \n\n" * 40
    expected = len(engine.text.encode(text))
    made = call(engine, "POST", TEXT, json={"model": NAME, "prompt": text, "max_tokens": 1})
    assert made.json()["usage"]["prompt_tokens"] == expected
    talk = [{"role": "user", "content": text}]
    made = call(engine, "POST", CHAT, json={"model": NAME, "messages": talk, "max_tokens": 1})
    assert made.json()["usage"]["prompt_tokens"] == len(engine.text.encode_chat(talk))


def test_an_engine_that_fails_is_a_500_that_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the kernel is broken")

    monkeypatch.setattr(engine, "_package", fail)
    error = refused(call(engine, "POST", TEXT, json={"model": NAME, "prompt": "fox"}), 500)
    assert (error["code"], error["type"]) == ("engine_error", "server_error")
    assert "the kernel is broken" in error["message"]
    streamed = call(engine, "POST", TEXT, json={"model": NAME, "prompt": "fox", "stream": True})
    assert refused(streamed, 500)["code"] == "engine_error", "nothing was sent before"
    monkeypatch.undo()
    assert call(engine, "POST", TEXT, json={"model": NAME, "prompt": "fox"}).status_code == 200


@pytest.mark.parametrize("streaming", [True, False])
def test_who_goes_is_not_answered_from_the_next_step_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """Tokens that are made after the engine was told: none but that of the step which was on its way."""
    told: list[float] = []
    cancel = RequestHandle.cancel

    def noted(answer: RequestHandle) -> None:
        told.append(engine.counts()["generation_tokens"])
        cancel(answer)

    monkeypatch.setattr(RequestHandle, "cancel", noted)
    body = {"model": NAME, "prompt": "fox", "max_tokens": 4000, "ignore_eos": True, "stream": streaming}
    before = engine.counts()["generation_tokens"]

    async def talk() -> None:
        serving = ServerContext(engine, ServerSettings(NAME), "fp_test", LogWriter(io.StringIO()))
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            while engine.counts()["generation_tokens"] < before + 20:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": TEXT, "headers": headers, "query_string": b""}
        await create_app(serving)(scope, receive, send)
        assert serving.admission.active == 0

    asyncio.run(talk())
    deadline = time.monotonic() + 60
    while (now := engine.counts())["decode_sequences"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told[0] >= before + 20
    assert now["generation_tokens"] <= told[0] + 1


@pytest.mark.fast
def test_spelling(tmp_path: Path) -> None:
    text = text_of(byte_tokenizer(), tmp_path / "bytes")
    spelled = TokenText(text)
    for string in ("The quick fox", "Über 🦊 你好"):
        tokens = text.tokenizer.encode(string, add_special_tokens=False).ids
        assert b"".join(bytes(spelled(token)[1] or ()) for token in tokens) == string.encode()
        assert all(spelled(token)[0].startswith("bytes:\\x") for token in tokens if not _readable(spelled(token)[1]))
    assert spelled(1) == ("<end>", tuple(b"<end>"))
    pieces = text_of(fallback_tokenizer(), tmp_path / "pieces")
    spelled = TokenText(pieces)
    letter, byte = pieces.tokenizer.token_to_id("▁a"), pieces.tokenizer.token_to_id("<0xE4>")
    assert letter is not None
    assert byte is not None
    assert spelled(letter) == (" a", tuple(b" a"))
    assert spelled(byte) == ("bytes:\\xe4", (0xE4,))


def _readable(raw: tuple[int, ...] | None) -> bool:
    try:
        bytes(raw or ()).decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.fast
def test_answers_end_where_nobody_says_so() -> None:
    chat = ChatRequest.model_validate({"model": NAME, "messages": TALK})
    text = CompletionRequest.model_validate({"model": NAME, "prompt": "fox"})
    for room, tokens in ((4096, (1024, 16)), (8, (8, 8))):
        bounds = request_builder.RequestLimits(room, room, 320, 10**6)
        assert tuple(request_builder._tokens(asked, bounds) for asked in (chat, text)) == tokens
    told = ChatRequest.model_validate({"model": NAME, "messages": TALK, "max_completion_tokens": 3000})
    assert request_builder._tokens(told, request_builder.RequestLimits(4096, 4096, 320, 10**6)) == 3000
