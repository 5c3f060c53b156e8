"""Lists of prompts and asynchronous streams: batched on one engine, with the answers that each prompt gets alone."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

import inlay
from inlay.errors import UsageError
from inlay.runtime.engine import Engine
from inlay.runtime.outputs import FinishReason, collect
from inlay.runtime.request import EngineClosedError, Request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inlay.runtime import LanguageModel, TokenOutput
    from inlay.runtime.chat_template import Messages

PROMPTS = [f"{'the quick ' * (n % 7)}fox number {n}" for n in range(80)]
"""More than slots and queue hold together."""


@pytest.fixture(scope="module")
def model(served_package: Path) -> Iterator[LanguageModel]:
    with inlay.load(served_package) as loaded:
        yield loaded


@pytest.mark.parametrize("sampling", [inlay.Sampling(), inlay.Sampling(temperature=0.9, top_p=0.9, seed=7)], ids=str)
def test_each_prompt_gets_the_answer_that_it_gets_alone(model: LanguageModel, sampling: inlay.Sampling) -> None:
    options: dict[str, Any] = {"sampling": sampling, "max_tokens": 9, "stop": ["zz"]}
    progress: list[int] = []
    found = model.generate(PROMPTS, **options, on_progress=progress.append)
    assert [(each.text, each.tokens, each.finish_reason) for each in found] == [
        (each.text, each.tokens, each.finish_reason) for each in (model.generate(each, **options) for each in PROMPTS)
    ]
    assert progress == list(range(1, len(PROMPTS) + 1))
    assert model.engine.counts()["generation_tokens"] > 0


def test_conversations_and_raw_prompts(model: LanguageModel) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "fox"}]
    talks: list[Messages] = [talk, talk]
    assert model.generate(talks, max_tokens=4)[1].tokens == model.generate(talk, max_tokens=4).tokens
    raw = model.generate(["fox", "dog"], max_tokens=4, raw=True)
    assert [each.tokens for each in raw] == [
        model.generate(each, max_tokens=4, raw=True).tokens for each in ("fox", "dog")
    ]
    nothing: list[str] = []
    assert model.generate(nothing) == []


def test_what_cannot_be_answered_is_found_before_anything_runs(model: LanguageModel) -> None:
    before = model.engine.counts()["accepted"]
    with pytest.raises(UsageError, match=r"^Prompt 2: "):
        model.generate(["fox", "dog", "fox " * 5000], max_tokens=4)
    with pytest.raises(UsageError, match="cannot be streamed"):
        model.generate(["fox"], stream=True)  # type: ignore[call-overload]
    assert model.engine.counts()["accepted"] == before


def test_an_interrupted_call_cancels_its_requests(model: LanguageModel) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPTS, max_tokens=200, on_progress=interrupt)
    assert model.generate("fox", max_tokens=3).tokens == model.generate(["fox"], max_tokens=3)[0].tokens
    assert model.engine.counts()["finished.cancelled"] > 0


def test_threads_share_the_engine(model: LanguageModel) -> None:
    expected = [each.tokens for each in model.generate(PROMPTS[:12], max_tokens=6)]
    found: dict[int, list[tuple[int, ...]]] = {}

    def work(number: int) -> None:
        found[number] = [each.tokens for each in model.generate(PROMPTS[:12], max_tokens=6)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), expected)


def test_asynchronous_streams(model: LanguageModel) -> None:
    async def read(prompt: str) -> list[TokenOutput]:
        return [piece async for piece in model.astream(prompt, max_tokens=7)]

    async def main() -> list[list[TokenOutput]]:
        return list(await asyncio.gather(*map(read, PROMPTS)))

    found = [collect(each).tokens for each in asyncio.run(main())]
    assert found == [model.generate(each, max_tokens=7).tokens for each in PROMPTS]


def test_leaving_an_asynchronous_stream_cancels_it(model: LanguageModel) -> None:
    before = model.engine.counts()["finished.cancelled"]

    async def main() -> None:
        stream = model.astream("fox", max_tokens=200)
        await anext(stream)
        await stream.aclose()
        while model.engine.counts()["finished.cancelled"] == before:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_closing_ends_what_runs_and_a_later_call_starts_again(served_package: Path) -> None:
    model = inlay.load(served_package)
    model.close()
    handle = model.engine.submit(inlay.runtime.request.Request((5, 6, 7), max_tokens=240, ignore_eos=True))
    model.close()
    ended = collect(handle)
    assert ended.finish_reason is FinishReason.CANCELLED
    assert len(ended.tokens) < 240
    assert len(model.generate(["fox", "dog"], max_tokens=2)) == 2
    model.close()


def test_an_aborted_request_has_only_the_tokens_that_were_generated(served_package: Path) -> None:
    engine = Engine.open(served_package)  # not started: nothing is generated
    handle = engine.submit(Request((5, 6, 7), max_tokens=9))
    engine.close()
    ended = collect(handle)
    assert (ended.tokens, ended.text, ended.tokens_per_second) == ((), "", None)


def test_a_list_is_answered_by_one_engine(served_package: Path) -> None:
    """`close` in between does not start a second engine that nobody closes."""
    model = inlay.load(served_package)
    opened: list[Engine] = []
    start = model._open_engine
    assert start is not None

    def open_engine() -> Engine:
        opened.append(start())
        return opened[-1]

    model._open_engine = open_engine
    closing = {3: model.close}
    with pytest.raises(EngineClosedError):
        model.generate(PROMPTS, max_tokens=2, on_progress=lambda done: closing.get(done, lambda: None)())
    assert len(opened) == 1


def test_streams_that_wait_are_not_counted_as_rejected(model: LanguageModel) -> None:
    before = model.engine.counts()["rejected"]

    async def read(prompt: str) -> None:
        async for _ in model.astream(prompt, max_tokens=2):
            pass

    async def main() -> None:
        await asyncio.gather(*map(read, PROMPTS * 2))

    asyncio.run(main())
    assert model.engine.counts()["rejected"] == before


def test_a_loop_that_closes_does_not_harm_other_requests(model: LanguageModel) -> None:
    """`asyncio.run` may end between a step and the delivery of its tokens."""
    expected = model.generate("fox", max_tokens=20).tokens
    loop = asyncio.new_event_loop()
    tokens = tuple(model._encode("fox", raw=False))
    gone = model.engine.submit(Request(tokens, max_tokens=20), loop)
    loop.close()
    other = model.engine.submit(Request(tokens, max_tokens=20))
    assert collect(other).tokens == expected
    assert gone.id != other.id


@pytest.mark.parametrize("prompt", [(text for text in ("fox",)), {"role": "user", "content": "fox"}, 7, None])
def test_what_is_not_a_prompt(model: LanguageModel, prompt: Any) -> None:
    with pytest.raises(UsageError, match="A prompt cannot be a "):
        model.generate(prompt)
