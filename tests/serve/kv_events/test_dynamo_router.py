"""A router of others, Dynamo's, reads Inlay's events and sends prompts to where their beginning is held."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from inlay.runtime.engine import Engine
from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.events import EventLog
from inlay.runtime.request import Request
from inlay.runtime.settings import EngineSettings
from tests.serve.kv_events.dynamo_router import routing

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from pathlib import Path

if not os.environ.get("CI"):
    pytest.importorskip("dynamo.llm", reason="pip install 'inlay[dev]'")
pytestmark = pytest.mark.fast
SIZE = 16


def _run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def _prompt(rng: random.Random, blocks: int = 4) -> list[int]:
    return [rng.randrange(32_000) for _ in range(SIZE * blocks)]


def _hold(manager: BlockManager, tokens: Sequence[int], salt: str = "") -> None:
    """What an engine does with a prompt that it has computed."""
    parent = None
    for start in range(0, len(tokens), SIZE):
        placed = manager.store(parent, tuple(tokens[start : start + SIZE]), salt)
        assert placed is not None
        parent = placed.block


def _caches(places: tuple[int, ...]) -> tuple[list[EventLog], list[BlockManager]]:
    logs = [EventLog(), EventLog()]
    return logs, [BlockManager(places, SIZE, log.add) for log in logs]


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_hundred_of_a_hundred(encoding: str) -> None:
    """Prompts are held by one of two, chosen by lot; requests begin with them and go on differently."""
    logs, managers = _caches((2_000,))
    rng = random.Random(5)
    prompts = [_prompt(rng) for _ in range(100)]
    homes = [rng.randrange(2) for _ in prompts]

    async def main() -> None:
        async with routing(logs, SIZE, encoding=encoding) as router:
            for prompt, home in zip(prompts, homes, strict=True):
                _hold(managers[home], prompt)
            for prompt, home in ((prompts[homes.index(home)], home) for home in (0, 1)):
                await router.until_known(prompt, [(4 * (home == each), 0) for each in (0, 1)])
            for prompt, home in zip(prompts[-2:], homes[-2:], strict=True):
                await router.until_known(prompt, [(4 * (home == each), 0) for each in (0, 1)])
            chosen = [await router.choice([*prompt, *_prompt(rng, 1)]) for prompt in prompts]
            assert sum(each == home for each, home in zip(chosen, homes, strict=True)) == 100

    _run(main())


def test_two_engines(package: Path) -> None:
    """The same with engines that have answered the prompts: what the router reads is what was really computed."""
    engines = [Engine.open(package, EngineSettings(block_size=SIZE, cache_bytes=1 << 24)) for _ in range(2)]
    rng = random.Random(9)
    prompts = [[rng.randrange(3, 256) for _ in range(SIZE * 3 + 5)] for _ in range(100)]
    homes = [rng.randrange(2) for _ in prompts]

    async def main() -> None:
        async with routing([engine.event_log for engine in engines], SIZE) as router:
            for prompt, home in zip(prompts, homes, strict=True):
                engines[home].submit(Request(tuple(prompt), max_tokens=1))
                while engines[home].step():
                    pass
            for home in (0, 1):
                last = max(at for at, each in enumerate(homes) if each == home)
                await router.until_known(prompts[last][: 3 * SIZE], [(3 * (home == each), 0) for each in (0, 1)])
            chosen = [await router.choice(prompt) for prompt in prompts]
            assert sum(each == home for each, home in zip(chosen, homes, strict=True)) == 100

    try:
        _run(main())
    finally:
        for engine in engines:
            engine.close()


def test_what_is_removed_moved_raised_and_cleared() -> None:
    logs, (manager, other) = _caches((4, 8))
    rng = random.Random(6)
    first, second = _prompt(rng), _prompt(rng)

    async def main() -> None:
        async with routing(logs, SIZE) as router:
            _hold(manager, first)
            await router.until_known(first, [(4, 0), (0, 0)])
            _hold(manager, second[: 2 * SIZE])
            await router.until_known(first, [(2, 2), (0, 0)])
            _hold(other, first[:SIZE])
            await router.until_known(first, [(2, 2), (1, 0)])
            for block in manager.lookup(first):
                manager.acquire([block])
                assert manager.promote(block) is not None
            await router.until_known(first, [(4, 0), (1, 0)])
            await router.until_known(second, [(0, 2), (0, 0)])
            manager.release(manager.lookup(first))
            manager.clear()
            await router.until_known(first, [(0, 0), (1, 0)])
            assert await router.choice(first) == 1

    _run(main())


def test_a_block_with_a_salt_attracts_only_those_who_know_it() -> None:
    logs, managers = _caches((100,))
    rng = random.Random(7)
    prompt, plain = _prompt(rng), _prompt(rng)

    async def main() -> None:
        async with routing(logs, SIZE) as router:
            _hold(managers[0], prompt, salt="mine")
            _hold(managers[1], prompt, salt="yours")
            _hold(managers[0], plain)
            await router.until_known(plain, [(4, 0), (0, 0)])
            await router.until_known(prompt, [(4, 0), (0, 0)], cache_salt="mine")
            await router.until_known(prompt, [(0, 0), (4, 0)], cache_salt="yours")
            assert await router.known(prompt) == [(0, 0), (0, 0)]
            assert await router.known(plain, cache_salt="mine") == [(0, 0), (0, 0)]

    _run(main())


@pytest.mark.parametrize("most", [10_000, 2])
def test_a_router_that_comes_late_knows_all(most: int) -> None:
    """With two batches kept, what it missed is not there any more, and it is told all that is held."""
    logs, managers = _caches((100,))
    rng = random.Random(8)
    prompts = [_prompt(rng) for _ in range(10)]

    async def main() -> None:
        async with routing(logs, SIZE, most=most, heartbeat=0.05) as first:
            for prompt in prompts:
                _hold(managers[0], prompt)
                await first.until_known(prompt, [(4, 0), (0, 0)])
            publisher = first.publishers[0]
            wire = {"kv_events_endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
            worker = {"worker_id": 7, "endpoint": "http://late", "block_size": SIZE, "model_name": "late"}
            await first.service.upsert_worker(worker | wire)
            for prompt in prompts:
                request = {"token_ids": prompt, "model_name": "late"}
                for _ in range(600):
                    (found,) = (await first.service.overlap_scores(request))["workers"]
                    if found["device_blocks"] == 4:
                        break
                    await asyncio.sleep(0.05)
                assert found["device_blocks"] == 4
            assert publisher.counts["replays"] >= 1

    _run(main())
