"""OpenAI's own client, unchanged, gets from a server what the package gives without one."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest

import inlay
from tests.serve.server_process import NAME, Server

openai = pytest.importorskip("openai")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inlay.runtime.language_model import LanguageModel

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does the fox say?"},
]
MORE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(package: Path) -> LanguageModel:
    return inlay.load(package)


def test_a_conversation(client: Any, model: LanguageModel) -> None:
    expected = model.generate(TALK, max_tokens=20)
    made = client.chat.completions.create(model=NAME, messages=TALK, max_tokens=20, temperature=0)
    assert made.choices[0].message.content == expected.text
    assert made.choices[0].finish_reason == ("length" if expected.finish_reason == "length" else "stop")
    assert made.usage.prompt_tokens == len(model.text.encode_chat(TALK))
    assert made.usage.completion_tokens == len(expected.tokens)
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert (made.object, made.model) == ("chat.completion", NAME)
    assert made.system_fingerprint.startswith("fp_")
    assert made._request_id in made.id


def test_a_text(client: Any, model: LanguageModel) -> None:
    expected = model.generate("The fox", max_tokens=16, raw=True)
    made = client.completions.create(model=NAME, prompt="The fox", temperature=0)
    assert made.choices[0].text == expected.text, "16 tokens are what OpenAI makes unless told"
    tokens = client.completions.create(model=NAME, prompt=model.text.encode("The fox"), temperature=0)
    assert tokens.choices[0].text == expected.text


def test_several_prompts(client: Any, model: LanguageModel) -> None:
    texts = ["The fox", "naïve café", "你好"]
    made = client.completions.create(model=NAME, prompt=texts, temperature=0, max_tokens=12, n=2)
    expected = [model.generate(text, max_tokens=12, raw=True).text for text in texts for _ in range(2)]
    assert [choice.text for choice in made.choices] == expected
    assert [choice.index for choice in made.choices] == list(range(6))
    assert made.usage.prompt_tokens == sum(len(model.text.encode(text)) for text in texts), "each prompt counts once"
    lists = [model.text.encode(text) for text in texts]
    again = client.completions.create(model=NAME, prompt=lists, temperature=0, max_tokens=12)
    assert [choice.text for choice in again.choices] == expected[::2]


def test_a_stream_is_the_same_text(client: Any) -> None:
    whole = client.chat.completions.create(model=NAME, messages=TALK, max_tokens=40, temperature=0, extra_body=MORE)
    chunks = list(
        client.chat.completions.create(
            model=NAME, messages=TALK, max_tokens=40, temperature=0, extra_body=MORE,
            stream=True, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert len(pieces) > 10, "token by token"
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert last.choices == []
    assert last.usage.completion_tokens == 40
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_streams_of_texts(client: Any) -> None:
    given = {"model": NAME, "prompt": ["The fox", "A dog"], "max_tokens": 30, "temperature": 0, "extra_body": MORE}
    whole = client.completions.create(**given)
    texts = {0: "", 1: ""}
    reasons = []
    for chunk in client.completions.create(**given, stream=True):
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons += [choice.finish_reason] * (choice.finish_reason is not None)
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]
    assert reasons == ["length", "length"]


def test_many_at_once(server: Server, model: LanguageModel) -> None:
    """Sequences that join and leave at every step do not change each other."""
    prompts = [f"{'fox ' * size}number {size}" for size in range(12)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(text: str) -> str:
                pieces = await client.completions.create(
                    model=NAME, prompt=text, max_tokens=10 + len(text), temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in pieces])

            return await asyncio.gather(*map(one, prompts))

    found = asyncio.run(ask())
    assert found == [model.generate(text, max_tokens=10 + len(text), raw=True).text for text in prompts]


def test_logprobs_of_a_conversation(client: Any) -> None:
    given = {"model": NAME, "messages": TALK, "max_tokens": 12, "temperature": 0, "extra_body": MORE}
    made = client.chat.completions.create(**given, logprobs=True, top_logprobs=3)
    tokens = made.choices[0].logprobs.content
    assert len(tokens) == 12
    for token in tokens:
        assert [each.logprob for each in token.top_logprobs] == sorted(
            (each.logprob for each in token.top_logprobs), reverse=True
        )
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob), "greedy"
        assert math.exp(token.logprob) <= 1
    text = b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace")
    assert text == made.choices[0].message.content
    streamed = [
        token
        for chunk in client.chat.completions.create(**given, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in tokens]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in tokens], abs=1e-3)
    assert client.chat.completions.create(**given, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_many_logprobs(client: Any) -> None:
    """So many that they are written in another thread."""
    given = {"model": NAME, "prompt": "The fox", "max_tokens": 300, "temperature": 0, "extra_body": MORE, "n": 2}
    made = client.completions.create(**given, logprobs=5)
    assert [len(choice.logprobs.tokens) for choice in made.choices] == [300, 300]


def test_logprobs_of_a_text(client: Any) -> None:
    given = {"model": NAME, "prompt": "The fox", "max_tokens": 8, "temperature": 0, "extra_body": MORE}
    listed = client.completions.create(**given, logprobs=2).choices[0].logprobs
    assert len(listed.tokens) == len(listed.token_logprobs) == len(listed.top_logprobs) == len(listed.text_offset) == 8
    for token, logprob, top in zip(listed.tokens, listed.token_logprobs, listed.top_logprobs, strict=True):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())
    sizes = [len(token) for token in listed.tokens]
    assert listed.text_offset == [sum(sizes[:at]) for at in range(8)]
    offsets = [
        offset
        for chunk in client.completions.create(**given, logprobs=2, stream=True)
        for offset in chunk.choices[0].logprobs.text_offset
    ]
    assert offsets == listed.text_offset


def test_stop_strings(client: Any) -> None:
    given = {"model": NAME, "prompt": "The fox", "max_tokens": 60, "temperature": 0, "extra_body": MORE}
    whole = client.completions.create(**given).choices[0].text
    stop = whole[20:23]
    made = client.completions.create(**given, stop=["never there", stop])
    assert made.choices[0].text == whole[: whole.index(stop)]
    assert made.choices[0].finish_reason == "stop"
    assert made.usage.completion_tokens < 60
    pieces = list(client.completions.create(**given, stop=stop, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == made.choices[0].text
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_seeds(client: Any) -> None:
    def ask(**given: Any) -> list[str]:
        made = client.completions.create(
            model=NAME, prompt="The fox", max_tokens=30, temperature=1.5, n=3, extra_body=MORE, **given
        )
        return [choice.text for choice in made.choices]

    first = ask(seed=7)
    assert ask(seed=7) == first
    assert len(set(first)) == 3, "choices differ"
    assert ask(seed=8)[:2] == first[1:], "a choice has the seed after that of the one before it"
    assert ask(seed=-1)[1] == ask(seed=0)[0]
    assert ask() != ask()


def test_sampling_options(client: Any) -> None:
    def ask(**more: Any) -> str:
        made = client.completions.create(model=NAME, prompt="The fox", max_tokens=20, extra_body={**MORE, **more})
        return made.choices[0].text

    greedy = ask(temperature=0)
    assert ask(temperature=2, top_k=1) == greedy
    assert ask(temperature=2, min_p=1) == greedy
    assert ask(temperature=2, top_p=1e-6) == greedy
    assert ask(temperature=0, repetition_penalty=50.0) != greedy
    assert ask(temperature=0.001) == greedy
    assert ask(temperature=0, top_k=-1) == greedy


def test_a_second_time_it_is_cached(client: Any) -> None:
    talk = [{"role": "user", "content": "A long story about foxes. " * 20}]

    def ask(**more: Any) -> Any:
        return client.chat.completions.create(model=NAME, messages=talk, max_tokens=4, temperature=0, extra_body=more)

    first, second = ask(), ask()
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > second.usage.prompt_tokens // 2
    assert first.choices[0].message.content == second.choices[0].message.content
    assert ask(cache_salt="mine").usage.prompt_tokens_details.cached_tokens == 0, "another salt, another cache"
    assert ask(cache_salt="mine").usage.prompt_tokens_details.cached_tokens > 0


def test_models(client: Any) -> None:
    assert [each.id for each in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "inlay"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=TALK)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=TALK, functions=[{"name": "f"}])
    assert refused.value.param == "functions"
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="fox, " * 5000)
    assert long.value.code == "context_length_exceeded"


def test_an_answer_can_be_given_back(client: Any) -> None:
    """What the client has as an assistant's message is a message to this server, with all its empty fields."""
    first = client.chat.completions.create(model=NAME, messages=TALK, max_tokens=4, temperature=0)
    turn = first.choices[0].message.model_dump()
    more = [*TALK, turn, {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    again = client.chat.completions.create(model=NAME, messages=more, max_tokens=4, temperature=0)
    assert again.usage.prompt_tokens > first.usage.total_tokens
