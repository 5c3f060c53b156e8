"""Readers of the KV-cache wire in processes of their own: one is stopped, one is killed, both know all in the end."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from inlay.runtime.kv.events import EventLog, RemovedEvent, StoredEvent
from inlay.serve.kv_events.publisher import Publisher
from tests.serve.kv_events.published_cache import Held, apply, expected, follow, publishing, reading, use

pytestmark = pytest.mark.fast
READING = """
    import json, sys
    from inlay.serve.kv_events.subscriber import Reader
    assert "torch" not in sys.modules

    held = set()
    with Reader(*sys.argv[1:]) as reader:
        while True:
            for batch in reader.read(1):
                for event in batch.events:
                    if event["type"] == "AllBlocksCleared":
                        held.clear()
                    elif event["type"] == "BlockRemoved":
                        held.difference_update(event["block_hashes"])
                    else:
                        held.update(event["block_hashes"])
                print(json.dumps([batch.number, sorted(held)]), flush=True)
"""


def _other_reader(publisher: Publisher) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(READING), publisher.endpoint, str(publisher.replay_endpoint)]
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _until(reading: subprocess.Popen[str], content: set[int]) -> int:
    """The number with which it knows this."""
    assert reading.stdout is not None
    for line in reading.stdout:
        number, held = json.loads(line)
        if set(held) == content:
            return int(number)
    raise AssertionError("it ended")


def test_one_who_stalls_costs_little_and_delays_nobody() -> None:
    """Some 80 MB go by one who is stopped. Another one reads them all."""
    log = EventLog(most=200)
    held: Held = {}
    with Publisher(log, 512, most=20, heartbeat=0.1) as publisher, reading(publisher) as reader:
        with _other_reader(publisher) as stalled:
            log.add(StoredEvent(None, 0, (0,) * 512, "", 0, 0))
            _until(stalled, {0})
            follow(reader, held, {0: (None, (0,) * 512, "GPU", "")})
            stalled.send_signal(signal.SIGSTOP)
            before, sent = _megabytes(), 0
            for number in range(1, 30_001):
                log.add(StoredEvent(None, number, tuple(range(100_000 + number, 100_512 + number)), "", 0, 0))
                log.add(RemovedEvent(number - 1, 0))
                if number % 50 == 0:
                    while number not in held:
                        for batch in reader.read(10):
                            apply(held, batch.events)
                            sent += len(msgspec.msgpack.encode(batch.events))
                            assert not batch.has_gap
            assert sent > 70 << 20
            assert _megabytes() - before < 40
            stalled.send_signal(signal.SIGCONT)
            _until(stalled, {30_000})
            stalled.kill()
        assert publisher.counts["replays"] > 2, "it asked for what it missed"
        assert publisher.counts["gaps"] == 0


def _megabytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


@pytest.mark.parametrize("most", [10_000, 2])
def test_one_who_is_killed_and_comes_back_knows_all(most: int) -> None:
    """Another one reads all the while, and notices nothing."""
    held: Held = {}
    with publishing(most=most) as (manager, publisher), reading(publisher) as reader:
        use(manager, 30)
        with _other_reader(publisher) as first:
            seen = _until(first, set(expected(manager)))
            first.send_signal(signal.SIGKILL)
        use(manager, 100, seed=1, pause=0.002)
        with _other_reader(publisher) as second:
            assert _until(second, set(expected(manager))) > seen
            use(manager, 30, seed=2)
            _until(second, set(expected(manager)))
            second.kill()
        follow(reader, held, expected(manager))
    assert first.returncode == -signal.SIGKILL
