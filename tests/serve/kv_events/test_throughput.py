"""How many KV-cache events a second go from a cache through the wire to a reader, all and in order."""

from __future__ import annotations

import threading
import time

import pytest

from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.events import EventLog
from inlay.serve.kv_events.publisher import Publisher
from inlay.serve.kv_events.subscriber import Reader
from tests.serve.kv_events.published_cache import Held, apply, expected


class Reading(threading.Thread):
    """Reads until it is told to end, and keeps count."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(daemon=True)
        self.publisher, self.held, self.numbers, self.gaps = publisher, Held(), list[int](), 0
        self.ending = False

    def run(self) -> None:
        with Reader(self.publisher.endpoint, self.publisher.replay_endpoint) as reader:
            while not self.ending or self.numbers[-1] + 1 < self.publisher.counts["batches"]:
                for batch in reader.read(0.05):
                    apply(self.held, batch.events)
                    self.numbers.append(batch.number)
                    self.gaps += batch.has_gap


def _pass(seconds: float, rate: float, kept: int = 10_000) -> tuple[float, int]:
    """Blocks of 16 tokens are stored in a cache of two levels: events a second, and the most that waited."""
    log = EventLog(kept)
    manager = BlockManager([2_000, 4_000], 16, log.add)
    with Publisher(log, 16) as publisher:
        reading = Reading(publisher)
        reading.start()
        began, first, number, lag = time.perf_counter(), log.next, 0, 0
        while (passed := time.perf_counter() - began) < seconds:
            while log.next - first < passed * rate:
                manager.store(None, tuple(range(number * 16, number * 16 + 16)))
                number += 1
            lag = max(lag, log.next - 1 - publisher.counts["events"])
            time.sleep(0.005)  # as between two steps of an engine
        found = (log.next - first) / (time.perf_counter() - began)
        while publisher.counts["events"] < log.next - 1:
            time.sleep(0.01)
        reading.ending = True
        reading.join(60)
        assert reading.numbers == list(range(len(reading.numbers)))
        assert (reading.gaps, publisher.counts["gaps"], publisher.counts["replays"]) == (0, 0, 1)
        same = reading.held == expected(manager)
        assert same, f"{len(reading.held)} blocks are known after {len(reading.numbers)} batches"
    return found, lag


@pytest.mark.fast
def test_all_arrive_in_order() -> None:
    _pass(2.0, rate=5_000, kept=100_000)


@pytest.mark.nightly
def test_ten_thousand_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    rate, lag = _pass(10.0, rate=12_000)
    with capsys.disabled():
        print(f"\n{rate:,.0f} events a second for 10 s, at most {lag:,} waiting")
    assert rate >= 10_000
