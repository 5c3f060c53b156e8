"""Ten times more requests than a server can answer: those it takes are answered as before, others get 429.

In CI a burst, whose outcome does not depend on the speed of the machine; nightly a rate, with latency and memory.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tools.benchmarks.http_client import ClientResult, send_request

from tests.serve.conftest import SLOTS
from tests.serve.server_process import Server, prompt

if TYPE_CHECKING:
    from pathlib import Path

TOKENS, QUEUE = 150, 4


async def _at_its_pace(server: Server, seconds: float) -> list[ClientResult]:
    """As many clients as there are slots, each with one request after the other."""
    until = time.monotonic() + seconds

    async def client() -> list[ClientResult]:
        told = []
        while time.monotonic() < until:
            told.append(await send_request(server.port, prompt(TOKENS)))
        return told

    return [each for told in await asyncio.gather(*(client() for _ in range(SLOTS))) for each in told]


async def _at_a_rate(server: Server, rate: float, seconds: float) -> list[ClientResult]:
    """So many requests a second, whatever becomes of them."""
    asked: list[asyncio.Task[ClientResult]] = []
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        while len(asked) < now * rate:
            asked.append(asyncio.create_task(send_request(server.port, prompt(TOKENS))))
        await asyncio.sleep(1 / rate)
    return list(await asyncio.gather(*asked))


def _overload(package: Path, folder: Path, seconds: float) -> None:
    with Server(package, folder, "--queue", str(QUEUE)) as server:
        asyncio.run(_at_its_pace(server, 1))
        alone = asyncio.run(_at_its_pace(server, 3))
        rate = len(alone) / 3
        asyncio.run(_at_a_rate(server, 10 * rate, seconds / 5))  # buffers grow to their size
        before = server.memory()
        told = asyncio.run(_at_a_rate(server, 10 * rate, seconds))
        grown = server.memory() - before
        statuses = Counter(each.status for each in told)
        answered = [each for each in told if each.status == 200]
        lasted = [each.end_time - each.start_time for each in answered]
        third = len(lasted) // 3
        early, late = statistics.median(lasted[:third]), statistics.median(lasted[-third:])
        print(
            f"{rate:.0f} answers/s at its pace; asked for {len(told) / seconds:.0f}/s over {seconds:.0f} s: {statuses},"
            f" {len(answered) / seconds:.0f} answers/s, each in {early:.2f} s at first and {late:.2f} s at last;"
            f" memory grew by {grown / 1e6:.1f} MB"
        )
        assert set(statuses) == {200, 429}
        assert statuses[429] > 3 * statuses[200]
        assert all(1 <= int(each.headers["retry-after"]) <= 60 for each in told if each.status == 429)
        assert {each.tokens for each in answered} == {TOKENS}
        assert late < 2 * early
        assert grown < 16 << 20
        figures = server.wait_until(lambda now: not now["active_requests"])
        assert figures['finished_total{reason="cancelled"}'] == figures['finished_total{reason="failed"}'] == 0
        assert figures["accepted_total"] == figures['finished_total{reason="length"}']


def test_a_burst(package: Path, tmp_path: Path) -> None:
    """More requests at once than there are slots and places in the queue."""
    with Server(package, tmp_path, "--queue", str(QUEUE)) as server:

        async def burst() -> list[ClientResult]:
            return await asyncio.gather(
                *(send_request(server.port, prompt(TOKENS)) for _ in range(10 * (SLOTS + QUEUE)))
            )

        told = asyncio.run(burst())
        statuses = Counter(each.status for each in told)
        assert set(statuses) == {200, 429}
        assert statuses[200] >= SLOTS + QUEUE
        assert all(1 <= int(each.headers["retry-after"]) <= 60 for each in told if each.status == 429)
        assert {each.tokens for each in told if each.status == 200} == {TOKENS}
        figures = server.wait_until(lambda now: not now["active_requests"])
        assert figures['finished_total{reason="cancelled"}'] == figures['finished_total{reason="failed"}'] == 0
        assert figures["accepted_total"] == figures['finished_total{reason="length"}'] == statuses[200]


@pytest.mark.nightly
def test_admission_for_a_minute(package: Path, tmp_path: Path) -> None:
    _overload(package, tmp_path, 60)
