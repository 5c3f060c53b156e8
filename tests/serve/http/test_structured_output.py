"""Structured output over HTTP: OpenAI's client gets JSON of its schema, streamed or not."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, Field

from tests.serve.server_process import NAME, Server

openai = pytest.importorskip("openai")

if TYPE_CHECKING:
    from collections.abc import Iterator

TALK: list[dict[str, Any]] = [{"role": "user", "content": "Who is there?"}]


class Person(BaseModel):
    """A schema with bounds, so that a random model comes to an end."""

    name: str = Field(max_length=5, pattern="^[a-z]+$")
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_parsed_answer(client: Any) -> None:
    """The client sends the schema of a pydantic model and reads the answer into it."""
    made = client.chat.completions.parse(model=NAME, messages=TALK, response_format=Person, max_tokens=100, seed=1)
    assert made.choices[0].finish_reason == "stop"
    assert isinstance(made.choices[0].message.parsed, Person)


def test_streams_and_choices(client: Any) -> None:
    given = {"model": NAME, "messages": TALK, "max_tokens": 100, "seed": 1, "n": 3}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    whole = client.chat.completions.create(**given, response_format=form)
    texts = [each.message.content for each in whole.choices]
    assert len({Person.model_validate_json(each).name for each in texts}) > 1, "each choice is sampled"
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**given, response_format=form, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_any_json_object(client: Any) -> None:
    form = {"type": "json_object"}
    made = client.chat.completions.create(
        model=NAME, messages=TALK, response_format=form, max_tokens=200, temperature=0, logprobs=True
    )
    text = made.choices[0].message.content
    assert text.startswith("{")
    if made.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    assert len(made.choices[0].logprobs.content) == made.usage.completion_tokens


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
        ({"json": {"enum": [1, 2]}}, "1|2"),
        ({"json": '{"enum": [3]}'}, "3"),
    ],
)
def test_what_vllm_accepts(client: Any, asked: dict[str, Any], expected: str) -> None:
    more = {"extra_body": {"structured_outputs": asked}, "max_tokens": 20}
    chat = client.chat.completions.create(model=NAME, messages=TALK, **more)
    assert re.fullmatch(expected, chat.choices[0].message.content)
    text = client.completions.create(model=NAME, prompt="The", **more)
    assert re.fullmatch(expected, text.choices[0].text)
