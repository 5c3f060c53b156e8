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
def loaded(package: Path) -> Iterator[LanguageModel]:
    with inlay.load(package) as loaded:
        yield loaded


@pytest.mark.parametrize("sampling", [inlay.Sampling(), inlay.Sampling(temperature=0.9, top_p=0.9, seed=7)], ids=str)
def test_each_prompt_gets_the_answer_that_it_gets_alone(loaded: LanguageModel, sampling: inlay.Sampling) -> None:
    options: dict[str, Any] = {"sampling": sampling, "max_tokens": 9, "stop": ["zz"]}
    progress: list[int] = []
    found = loaded.generate(PROMPTS, **options, on_progress=progress.append)
    assert [(each.text, each.tokens, each.finish_reason) for each in found] == [
        (each.text, each.tokens, each.finish_reason) for each in (loaded.generate(each, **options) for each in PROMPTS)
    ]
    assert progress == list(range(1, len(PROMPTS) + 1))
    assert loaded.engine.counts()["generation_tokens"] > 0


def test_conversations_and_raw_prompts(loaded: LanguageModel) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "fox"}]
    talks: list[Messages] = [talk, talk]
    assert loaded.generate(talks, max_tokens=4)[1].tokens == loaded.generate(talk, max_tokens=4).tokens
    raw = loaded.generate(["fox", "dog"], max_tokens=4, raw=True)
    assert [each.tokens for each in raw] == [
        loaded.generate(each, max_tokens=4, raw=True).tokens for each in ("fox", "dog")
    ]
    nothing: list[str] = []
    assert loaded.generate(nothing) == []


def test_what_cannot_be_answered_is_found_before_anything_runs(loaded: LanguageModel) -> None:
    before = loaded.engine.counts()["accepted"]
    with pytest.raises(UsageError, match=r"^Prompt 2: "):
        loaded.generate(["fox", "dog", "fox " * 5000], max_tokens=4)
    with pytest.raises(UsageError, match="cannot be streamed"):
        loaded.generate(["fox"], stream=True)  # type: ignore[call-overload]
    assert loaded.engine.counts()["accepted"] == before


def test_an_interrupted_call_cancels_its_requests(loaded: LanguageModel) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loaded.generate(PROMPTS, max_tokens=200, on_progress=interrupt)
    assert loaded.generate("fox", max_tokens=3).tokens == loaded.generate(["fox"], max_tokens=3)[0].tokens
    assert loaded.engine.counts()["finished.cancelled"] > 0


def test_threads_share_the_engine(loaded: LanguageModel) -> None:
    expected = [each.tokens for each in loaded.generate(PROMPTS[:12], max_tokens=6)]
    found: dict[int, list[tuple[int, ...]]] = {}

    def work(number: int) -> None:
        found[number] = [each.tokens for each in loaded.generate(PROMPTS[:12], max_tokens=6)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), expected)


def test_asynchronous_streams(loaded: LanguageModel) -> None:
    async def read(prompt: str) -> list[TokenOutput]:
        return [piece async for piece in loaded.astream(prompt, max_tokens=7)]

    async def main() -> list[list[TokenOutput]]:
        return list(await asyncio.gather(*map(read, PROMPTS)))

    found = [collect(each).tokens for each in asyncio.run(main())]
    assert found == [loaded.generate(each, max_tokens=7).tokens for each in PROMPTS]


def test_leaving_an_asynchronous_stream_cancels_it(loaded: LanguageModel) -> None:
    before = loaded.engine.counts()["finished.cancelled"]

    async def main() -> None:
        stream = loaded.astream("fox", max_tokens=200)
        await anext(stream)
        await stream.aclose()
        while loaded.engine.counts()["finished.cancelled"] == before:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_closing_ends_what_runs_and_a_later_call_starts_again(package: Path) -> None:
    loaded = inlay.load(package)
    loaded.close()
    handle = loaded.engine.submit(inlay.runtime.request.Request((5, 6, 7), max_tokens=240, ignore_eos=True))
    loaded.close()
    ended = collect(handle)
    assert ended.finish_reason is FinishReason.CANCELLED
    assert len(ended.tokens) < 240
    assert len(loaded.generate(["fox", "dog"], max_tokens=2)) == 2
    loaded.close()


def test_an_aborted_request_has_only_the_tokens_that_were_generated(package: Path) -> None:
    engine = Engine.open(package)  # not started: nothing is generated
    handle = engine.submit(Request((5, 6, 7), max_tokens=9))
    engine.close()
    ended = collect(handle)
    assert (ended.tokens, ended.text, ended.tokens_per_second) == ((), "", None)


def test_a_list_is_answered_by_one_engine(package: Path) -> None:
    """`close` in between does not start a second engine that nobody closes."""
    loaded = inlay.load(package)
    opened: list[Engine] = []
    start = loaded._open_engine
    assert start is not None

    def open_engine() -> Engine:
        opened.append(start())
        return opened[-1]

    loaded._open_engine = open_engine
    closing = {3: loaded.close}
    with pytest.raises(EngineClosedError):
        loaded.generate(PROMPTS, max_tokens=2, on_progress=lambda done: closing.get(done, lambda: None)())
    assert len(opened) == 1


def test_streams_that_wait_are_not_counted_as_rejected(loaded: LanguageModel) -> None:
    before = loaded.engine.counts()["rejected"]

    async def read(prompt: str) -> None:
        async for _ in loaded.astream(prompt, max_tokens=2):
            pass

    async def main() -> None:
        await asyncio.gather(*map(read, PROMPTS * 2))

    asyncio.run(main())
    assert loaded.engine.counts()["rejected"] == before


def test_a_loop_that_closes_does_not_harm_other_requests(loaded: LanguageModel) -> None:
    """`asyncio.run` may end between a step and the delivery of its tokens."""
    expected = loaded.generate("fox", max_tokens=20).tokens
    loop = asyncio.new_event_loop()
    tokens = tuple(loaded._encode("fox", raw=False))
    gone = loaded.engine.submit(Request(tokens, max_tokens=20), loop)
    loop.close()
    other = loaded.engine.submit(Request(tokens, max_tokens=20))
    assert collect(other).tokens == expected
    assert gone.id != other.id


@pytest.mark.parametrize("prompt", [(text for text in ("fox",)), {"role": "user", "content": "fox"}, 7, None])
def test_what_is_not_a_prompt(loaded: LanguageModel, prompt: Any) -> None:
    with pytest.raises(UsageError, match="A prompt cannot be a "):
        loaded.generate(prompt)
