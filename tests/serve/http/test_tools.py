"""Tools over HTTP with OpenAI's client: forced and free calls, streams, results given back; penalties and biases."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.server_process import NAME, Server

openai = pytest.importorskip("openai")

if TYPE_CHECKING:
    from collections.abc import Iterator

TALK: list[dict[str, Any]] = [{"role": "user", "content": "Is it sunny?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "day": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "day"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def _ask(client: Any, **given: Any) -> Any:
    return client.chat.completions.create(**{"model": NAME, "messages": TALK, "max_tokens": 300, "seed": 1, **given})


def _joined(chunks: Any) -> tuple[str, list[dict[str, Any]], str]:
    """The content, the calls and the finish reason of a stream of one choice."""
    content, calls, finish = "", list[dict[str, Any]](), ""
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for each in choice.delta.tool_calls or ():
                if each.id:
                    assert each.index == len(calls)
                    assert each.type == "function"
                    calls.append({"id": each.id, "name": each.function.name, "arguments": ""})
                calls[each.index]["arguments"] += each.function.arguments or ""
    return content, calls, finish


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls(client: Any, choice: Any) -> None:
    given: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": False}
    made = _ask(client, **given).choices[0]
    assert (made.finish_reason, made.message.content) == ("tool_calls", None)
    (call,) = made.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if choice != "required":
        assert call.function.name == "weather"
        assert arguments["city"] in ("Paris", "Rome")
        assert 1 <= arguments["day"] <= 9
    content, calls, finish = _joined(_ask(client, **given, stream=True))
    assert (content, finish) == ("", "tool_calls")
    assert [(each["name"], each["arguments"]) for each in calls] == [(call.function.name, call.function.arguments)]
    assert calls[0]["id"] != call.id


def test_two_tools_one_after_the_other(client: Any) -> None:
    """The calls of an answer and their results are messages of the next request."""
    messages = list(TALK)
    for name in ("weather", "clock"):
        forced = {"type": "function", "function": {"name": name}}
        made = _ask(client, messages=messages, tools=[WEATHER, CLOCK], tool_choice=forced, parallel_tool_calls=False)
        message = made.choices[0].message
        assert [each.function.name for each in message.tool_calls] == [name]
        messages.append(message.model_dump())
        messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"{name}: fine"})
    last = _ask(client, messages=messages, tools=[WEATHER, CLOCK], max_tokens=5)
    assert last.choices[0].message.tool_calls is None
    assert last.usage.prompt_tokens > made.usage.prompt_tokens


def test_free_calls_and_choices(client: Any) -> None:
    """Without force, the answer of a random model is text, whole and streamed; each choice has its own calls."""
    given: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 20}
    whole = _ask(client, **given).choices[0]
    assert whole.message.tool_calls is None
    assert _joined(_ask(client, **given, stream=True))[:2] == (whole.message.content, [])
    several = _ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, n=3)
    assert all(len(each.message.tool_calls) == 1 for each in several.choices)
    assert len({each.message.tool_calls[0].id for each in several.choices}) == 3


def test_a_call_or_json(client: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    made = _ask(client, tools=[WEATHER], response_format=form, parallel_tool_calls=False).choices[0]
    assert made.message.tool_calls or json.loads(made.message.content)["x"] in (1, 2)


def test_logit_bias_and_min_tokens(client: Any) -> None:
    """A bias of 100 forces a token, -100 excludes one, and min_tokens excludes the end."""
    forced = client.completions.create(model=NAME, prompt="The", max_tokens=3, temperature=0, logit_bias={"70": 100})
    again = client.completions.create(model=NAME, prompt="The", max_tokens=3, temperature=0, logit_bias={"71": 100})
    assert len(set(forced.choices[0].text)) == len(set(again.choices[0].text)) == 1
    assert forced.choices[0].text != again.choices[0].text
    given: dict[str, Any] = {"model": NAME, "prompt": "The", "max_tokens": 8, "logit_bias": {"1": 100}}
    assert client.completions.create(**given).usage.completion_tokens == 1, "the end token"
    longer = client.completions.create(**given, extra_body={"min_tokens": 5})
    assert longer.usage.completion_tokens == 6


def test_penalties(client: Any) -> None:
    """A frequency penalty keeps a model from saying one token only."""
    given: dict[str, Any] = {"model": NAME, "prompt": "The", "max_tokens": 12, "temperature": 0}
    biased = {**given, "logit_bias": {"70": 30, "71": 29}}
    plain = client.completions.create(**biased).choices[0].text
    varied = client.completions.create(**biased, frequency_penalty=2.0).choices[0].text
    assert max(map(plain.count, plain)) > max(map(varied.count, varied))
