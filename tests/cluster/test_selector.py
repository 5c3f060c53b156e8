"""The selector, with Dynamo's selection service and the events of real caches."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from inlay.cluster import selector as selectors
from inlay.cluster.selector import EngineAddress, Selector
from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.events import EventLog
from inlay.serve.kv_events.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

if not os.environ.get("CI"):
    pytest.importorskip("dynamo.llm", reason="pip install 'inlay[dev]'")
pytestmark = pytest.mark.fast
SIZE = 16
NAMES = ("one", "two", "three")
NOT = {name: set(NAMES) - {name} for name in NAMES}
"""What to exclude so that only this one is left."""


class Replicas:
    """Caches with a selector that hears of them."""

    def __init__(
        self, selector: Selector, managers: dict[str, BlockManager], addresses: dict[str, EngineAddress]
    ) -> None:
        self.selector, self.managers, self.addresses = selector, managers, addresses
        self._asked = 0

    def hold(self, name: str, tokens: Sequence[int], salt: str = "") -> None:
        """Store a prompt in a cache, as an engine does that computed it."""
        parent = None
        for start in range(0, len(tokens), SIZE):
            placed = self.managers[name].store(parent, tuple(tokens[start : start + SIZE]), salt)
            assert placed is not None
            parent = placed.block

    async def choose(self, tokens: Sequence[int], salt: str = "", names: Sequence[str] = NAMES) -> tuple[str, int]:
        """Return the choice for a prompt, and release it."""
        self._asked += 1
        request = f"asked-{self._asked}"
        found = await self.selector.select(request, tokens, salt, set(NAMES) - set(names), 10)
        await self.selector.release(request)
        assert found is not None
        return found.worker, found.cached_tokens

    async def until(self, tokens: Sequence[int], expected: tuple[str, int], salt: str = "") -> None:
        """Wait until the choice is this."""
        for _ in range(600):
            if (found := await self.choose(tokens, salt)) == expected:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{found} is chosen, not {expected}")


@asynccontextmanager
async def replicas(
    clock: Callable[[], float] = time.monotonic, predicted_seconds: float = 0.0
) -> AsyncIterator[Replicas]:
    """Three replicas with empty caches."""
    with ExitStack() as stack:
        logs = {name: EventLog() for name in NAMES}
        managers = {name: BlockManager((200,), SIZE, logs[name].add) for name in NAMES}
        made = {name: stack.enter_context(Publisher(logs[name], SIZE)) for name in NAMES}
        found = {
            name: EngineAddress(name, each.endpoint, str(each.replay_endpoint), SIZE) for name, each in made.items()
        }
        selector = Selector(clock=clock, predicted_seconds=predicted_seconds)
        stack.callback(selector.close)
        await selector.update(found.values(), ())
        yield Replicas(selector, managers, found)


def _run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def _prompt(rng: random.Random, blocks: int = 4) -> list[int]:
    return [rng.randrange(32_000) for _ in range(SIZE * blocks)]


def test_a_prompt_goes_where_it_is_cached_and_to_nobody_else_s_cache() -> None:
    rng = random.Random(1)
    prompt, other = _prompt(rng), _prompt(rng)

    async def main() -> None:
        async with replicas() as here:
            here.hold("two", prompt)
            here.hold("three", other, salt="tenant")
            await here.until([*prompt, 5], ("two", 4 * SIZE))
            await here.until([*other, 5], ("three", 4 * SIZE), salt="tenant")
            assert (await here.choose(prompt, salt="tenant"))[1] == 0
            assert (await here.choose(other))[1] == 0
            assert await here.choose([*prompt, 5], names=["one"]) == ("one", 0)

    _run(main())


def test_a_replica_that_is_gone_is_not_chosen_and_one_that_is_back_is_new() -> None:
    prompt = _prompt(random.Random(2))

    async def main() -> None:
        async with replicas() as here:
            here.hold("two", prompt)
            await here.until(prompt, ("two", 4 * SIZE))
            await here.selector.update((), ["two", "never there"])
            assert here.selector._workers.keys() == {"one", "three"}
            assert (await here.choose(prompt))[1] == 0
            assert await here.selector.select("x", prompt, "", NOT["two"], 1) is None
            await here.selector.update([here.addresses["two"]], ())
            await here.until(prompt, ("two", 4 * SIZE))

    _run(main())


def test_requests_that_come_at_once_are_spread() -> None:
    """Each selection reserves its load, so the next ones see it; a finished one does not count."""
    rng = random.Random(3)

    async def main() -> None:
        async with replicas() as here:
            found = [await here.selector.select(f"r{n}", _prompt(rng, 8), "", (), 50) for n in range(9)]
            chosen = [each.worker for each in found if each is not None]
            assert {name: chosen.count(name) for name in NAMES} == dict.fromkeys(NAMES, 3)
            await here.selector.start_decode("r0")
            for number in range(9):
                if chosen[number] == "two":
                    await here.selector.release(f"r{number}")
                    await here.selector.release(f"r{number}")  # twice is once
            again = await here.selector.select("again", _prompt(rng, 8), "", (), 50)
            assert again is not None
            assert again.worker == "two"

    _run(main())


def test_reservations_of_a_replica_that_is_gone_fail_nothing() -> None:
    """The service drops them. What an ended or expired one releases then must not fail the next selection."""
    rng, now = random.Random(7), [0.0]

    async def main() -> None:
        async with replicas(clock=lambda: now[0]) as here:
            for name in NAMES:
                assert await here.selector.select(name, _prompt(rng, 2), "", NOT[name], 5) is not None
            await here.selector.update((), ["one", "two"])
            await here.selector.start_decode("one")
            await here.selector.release("one")
            now[0] += 2 * selectors.LEASE
            assert await here.selector.select("next", _prompt(rng, 2), "", (), 5) is not None

    _run(main())


def test_requests_with_one_prefix_that_come_at_once_stay_together() -> None:
    """The first one is not computed yet, so no KV event says that a replica has the prefix. Tenants share nothing."""
    rng = random.Random(6)
    prefixes = [_prompt(rng, 16) for _ in range(3)]

    async def main() -> None:
        async with replicas(predicted_seconds=30.0) as here:
            chosen: dict[int, list[tuple[str, int]]] = {0: [], 1: [], 2: []}
            for number in range(12):
                of = number % 3
                found = await here.selector.select(f"r{number}", [*prefixes[of], *_prompt(rng, 1)], "", (), 5)
                assert found is not None
                chosen[of].append((found.worker, found.cached_tokens))
            for first, *others in chosen.values():
                assert first[1] == 0
                assert others == [(first[0], 16 * SIZE)] * 3
            assert len({of[0][0] for of in chosen.values()}) == 3, "different prefixes are spread"
            other = await here.selector.select("tenant", prefixes[0], "tenant", (), 5)
            assert other is not None
            assert other.cached_tokens == 0

    _run(main())


def test_what_nobody_released_expires() -> None:
    now = [0.0]
    rng = random.Random(4)

    async def main() -> None:
        async with replicas(clock=lambda: now[0]) as here:
            for number in range(6):
                await here.selector.select(f"lost{number}", _prompt(rng, 8), "", NOT["one"], 50)
            assert (await here.choose(_prompt(rng), names=["one", "two"]))[0] == "two"
            now[0] = selectors.LEASE + 1
            await here.selector.select("busy", _prompt(rng, 8), "", NOT["two"], 50)
            assert (await here.choose(_prompt(rng), names=["one", "two"]))[0] == "one"

    _run(main())


def test_a_request_that_ends_while_it_is_placed_leaves_no_load() -> None:
    rng = random.Random(7)

    async def main() -> None:
        async with replicas() as here:
            for number in range(6):
                placing = asyncio.ensure_future(here.selector.select(f"r{number}", _prompt(rng, 8), "", NOT["one"], 50))
                await asyncio.sleep(0)
                await here.selector.release(f"r{number}")
                await placing
            await here.selector.select("busy", _prompt(rng, 2), "", NOT["two"], 50)
            assert (await here.choose(_prompt(rng), names=["one", "two"]))[0] == "one"

    _run(main())


def test_one_name_has_one_reservation() -> None:
    """Serve may ask again for the same request, if the chosen replica was full."""
    rng = random.Random(5)

    async def main() -> None:
        async with replicas() as here:
            for _ in range(4):
                assert await here.selector.select("same", _prompt(rng, 8), "", NOT["one"], 50) is not None
            await here.selector.release("same")
            await here.selector.select("busy", _prompt(rng, 2), "", NOT["two"], 50)
            assert (await here.choose(_prompt(rng), names=["one", "two"]))[0] == "one"

    _run(main())
