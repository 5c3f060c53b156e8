"""The KV-cache wire: what is published is read, whole and in order, also by those who were slow, late or killed."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from wire_content import Held, apply, expected, follow

from inlay.errors import UsageError
from inlay.runtime.kv.events import Log, Removed, Stored
from inlay.runtime.kv.manager import Manager
from inlay.serve.kv_form import LAST
from inlay.serve.kv_reader import Reader
from inlay.serve.kv_wire import Publisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inlay.serve.kv_reader import Batch

pytestmark = pytest.mark.fast
SIZE = 4


class Event(msgspec.Struct, tag=True):
    """Events as vLLM declares them since June 2026."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class OldEvent(msgspec.Struct, tag=True, array_like=True):
    """And before."""


class OldStored(OldEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None


class OldRemoved(OldEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class OldCleared(OldEvent, tag="AllBlocksCleared"):
    pass


class Payload(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class NewPayload(Payload):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class OldPayload(Payload):
    events: list[OldStored | OldRemoved | OldCleared]


@pytest.fixture
def publish() -> Iterator[Callable[..., tuple[Manager, Publisher]]]:
    """A cache that is published, until the test ends."""
    with ExitStack() as stack:

        def made(places: tuple[int, ...] = (20, 20), log: Log | None = None, **options: Any) -> Any:
            log = log or Log()
            manager = Manager(places, SIZE, log.add)
            return manager, stack.enter_context(Publisher(log, SIZE, **{"heartbeat": 0.05, **options}))

        yield made


def _use(manager: Manager, requests: int, seed: int = 0, salts: tuple[str, ...] = ("",), pause: float = 0.0) -> None:
    """Requests with common beginnings, some of which are held for a while."""
    rng = random.Random(seed)
    held: list[Any] = []
    for _ in range(requests):
        tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 5))]
        salt = rng.choice(salts)
        line = manager.lookup(tokens, salt)
        manager.hold(line)
        while len(line) * SIZE < len(tokens):
            part = tuple(tokens[len(line) * SIZE :][:SIZE])
            placed = manager.store(line[-1] if line else None, part, salt, rng.randrange(3))
            if placed is None:
                break
            manager.hold([placed.block])
            line.append(placed.block)
        for block in line:
            manager.raise_up(block)
        if line:
            manager.set_priority(line[0], rng.randrange(3))
        held.append(line)
        if len(held) > 2:
            manager.drop(held.pop(0))
        if pause:
            time.sleep(pause)
    for line in held:
        manager.drop(line)


def _reading(publisher: Publisher) -> Reader:
    return Reader(publisher.endpoint, publisher.replay_endpoint)


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_what_is_published_is_what_is_held(publish: Any, encoding: str) -> None:
    manager, publisher = publish((5, 6, 7), encoding=encoding, rank=3)
    held: Held = {}
    with _reading(publisher) as reader:
        for seed in range(5):
            _use(manager, 100, seed)
            batches = follow(reader, held, expected(manager))
            assert not any(batch.gap for batch in batches)
            assert all(batch.rank == 3 for batch in batches)
        assert {medium for _, _, medium in held.values()} == {"GPU", "CPU", "STORAGE"}
        manager.clear()
        follow(reader, held, {})


@pytest.mark.parametrize(("encoding", "declared"), [("map", NewPayload), ("array", OldPayload)])
def test_the_frames_are_those_of_vllm(publish: Any, encoding: str, declared: type[Payload]) -> None:
    """Read with nothing of Inlay's: the types that vLLM declares, and its loop."""
    manager, publisher = publish((2, 8), encoding=encoding, topic="kv@here", rank=1)
    with zmq.Context() as context, context.socket(zmq.SUB) as wire, context.socket(zmq.DEALER) as again:
        wire.subscribe("kv@")
        wire.connect(publisher.endpoint)
        assert wire.poll(10_000)
        _use(manager, 50)
        before, names = None, set()
        while before is None or names < {"BlockStored", "BlockRemoved"}:
            assert wire.poll(10_000)
            topic, number, payload = wire.recv_multipart()
            batch = msgspec.msgpack.decode(payload, type=declared)
            assert (topic, len(number), batch.data_parallel_rank) == (b"kv@here", 8, 1)
            assert abs(batch.ts - time.time()) < 60
            assert before is None or int.from_bytes(number, "big") == before + 1
            before = int.from_bytes(number, "big")
            names |= {event.__struct_config__.tag for event in batch.events}
        again.connect(publisher.replay_endpoint)
        again.send_multipart([b"", (1).to_bytes(8, "big")])
        numbers = []
        while True:
            assert again.poll(10_000)
            nothing, topic, number, payload = again.recv_multipart()
            if number == LAST:
                break
            numbers.append(int.from_bytes(number, "big"))
            msgspec.msgpack.decode(payload, type=declared)
            assert (nothing, topic) == (b"", b"kv@here")
        assert (nothing, topic, payload) == (b"", b"", b"")
        assert numbers == list(range(1, len(numbers) + 1))
        assert numbers[-1] >= before


def test_a_lost_batch_is_had_again(publish: Any) -> None:
    manager, publisher = publish()
    held: Held = {}
    with _reading(publisher) as reader:
        follow(reader, held, {})
        for seed in range(5):
            before = publisher.counts["replays"]
            _use(manager, 20, seed)
            assert reader._in.poll(10_000)
            lost = int.from_bytes(reader._in.recv_multipart()[1], "big")
            batches = follow(reader, held, expected(manager))
            assert lost in [batch.number for batch in batches]
            assert not any(batch.gap for batch in batches)
            assert publisher.counts["replays"] == before + 1


def test_a_loss_before_a_quiet_time_is_noticed(publish: Any) -> None:
    """Nothing happens after it, and still it is known before long."""
    manager, publisher = publish(heartbeat=0.3)
    held: Held = {}
    with _reading(publisher) as reader:
        follow(reader, held, {})
        _use(manager, 20)
        while publisher.counts["events"] < publisher._log.next - 1:  # the first one came before it
            time.sleep(0.01)
        while reader._in.poll(50):
            reader._in.recv_multipart()
        *missed, last = follow(reader, held, expected(manager))
        assert missed[0].events
        assert not last.events, "the empty one by which it was noticed"


def test_one_who_comes_late_knows_all(publish: Any) -> None:
    manager, publisher = publish(heartbeat=60)
    _use(manager, 200, pause=0.003)
    held: Held = {}
    with _reading(publisher) as reader:
        batches = follow(reader, held, expected(manager))
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert len(batches) > 5


def test_one_who_comes_too_late_is_told_and_knows_all(publish: Any) -> None:
    """What it would have to read is not kept any more: it gets one batch that holds everything."""
    manager, publisher = publish(most=3, heartbeat=60)
    _use(manager, 200, salts=("", "mine"), pause=0.003)
    time.sleep(0.1)
    held: Held = {}
    with _reading(publisher) as reader:
        batch, *rest = follow(reader, held, expected(manager))
        assert (batch.gap, rest) == (True, [])
        assert batch.events[0] == {"type": "AllBlocksCleared"}
        assert batch.number == publisher.counts["batches"] - 1
        _use(manager, 20, seed=1)
        assert not any(batch.gap for batch in follow(reader, held, expected(manager)))


def test_without_replay_a_gap_is_told(publish: Any) -> None:
    manager, publisher = publish(replay=None)
    assert publisher.replay_endpoint is None
    with Reader(publisher.endpoint) as reader:
        numbers: list[tuple[int, bool]] = []
        for _ in range(3):
            _use(manager, 5)
            assert reader._in.poll(10_000)
            numbers += [(batch.number, batch.gap) for batch in reader.read(1)]
            assert reader._in.poll(10_000)
            reader._in.recv_multipart()
        numbers += [(batch.number, batch.gap) for batch in reader.read(1)]
    found = [number for number, _ in numbers]
    assert found == sorted(set(found))
    for (before, _), (number, gap) in pairwise(numbers):
        assert gap == (number != before + 1)
    assert sum(gap for _, gap in numbers) >= 3


def test_a_publisher_that_is_started_again_is_noticed() -> None:
    log = Log()
    manager = Manager([20], SIZE, log.add)
    held: Held = {}
    with Publisher(log, SIZE, heartbeat=0.02) as first:
        _use(manager, 50, pause=0.001)
        reader = _reading(first)
        follow(reader, held, expected(manager))
        time.sleep(0.2)
    log = Log()
    manager = Manager([20], SIZE, log.add)
    _use(manager, 50, seed=1)
    assert first.replay_endpoint is not None
    with Publisher(log, SIZE, heartbeat=0.02, bind=first.endpoint, replay=first.replay_endpoint):
        batches = follow(reader, held, expected(manager))
        assert next(batch for batch in batches if batch.events).gap
    reader.close()


def test_a_publisher_that_is_too_slow_says_what_is_held_now(publish: Any) -> None:
    log = Log(most=5)
    manager, publisher = publish(log=log)
    held: Held = {}
    with _reading(publisher) as reader:
        follow(reader, held, {})
        _use(manager, 100)
        batches = follow(reader, held, expected(manager))
    assert publisher.counts["gaps"] >= 1
    assert any(event["type"] == "AllBlocksCleared" for batch in batches for event in batch.events)
    assert not any(batch.gap for batch in batches), "the wire itself lost nothing"


def test_blocks_with_a_salt_stay_off_the_wire(publish: Any) -> None:
    """A router that knows no salts would take them for plain ones."""
    manager, publisher = publish((4, 6))
    held: Held = {}
    seen: list[Batch] = []
    with _reading(publisher) as reader:
        for seed in range(5):
            _use(manager, 40, seed, salts=("", "mine", "yours"))
            seen += follow(reader, held, expected(manager))
    secret = {block.hash for block in manager if block.salt}
    told = {hash_ for batch in seen for event in batch.events for hash_ in event.get("block_hashes", ())}
    assert secret
    assert told
    assert not secret & told
    assert publisher.counts["withheld"] > 100


READING = """
    import json, sys
    from inlay.serve.kv_reader import Reader
    from wire_content import apply

    assert "torch" not in sys.modules

    held = {}
    with Reader(*sys.argv[1:]) as reader:
        while True:
            for batch in reader.read(1):
                apply(held, batch.events)
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
    log = Log(most=200)
    held: Held = {}
    with Publisher(log, 512, most=20, heartbeat=0.1) as publisher, _reading(publisher) as reader:
        with _other_reader(publisher) as stalled:
            log.add(Stored(None, 0, (0,) * 512, "", 0, 0))
            _until(stalled, {0})
            follow(reader, held, {0: (None, (0,) * 512, "GPU")})
            stalled.send_signal(signal.SIGSTOP)
            before, sent = _megabytes(), 0
            for number in range(1, 30_001):
                log.add(Stored(None, number, tuple(range(100_000 + number, 100_512 + number)), "", 0, 0))
                log.add(Removed(number - 1, 0))
                if number % 50 == 0:
                    while number not in held:
                        for batch in reader.read(10):
                            apply(held, batch.events)
                            sent += len(msgspec.msgpack.encode(batch.events))
                            assert not batch.gap
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
def test_one_who_is_killed_and_comes_back_knows_all(publish: Any, most: int) -> None:
    """Another one reads all the while, and notices nothing."""
    manager, publisher = publish(most=most)
    held: Held = {}
    with _reading(publisher) as reader:
        _use(manager, 30)
        with _other_reader(publisher) as first:
            seen = _until(first, set(expected(manager)))
            first.send_signal(signal.SIGKILL)
        _use(manager, 100, seed=1, pause=0.002)
        with _other_reader(publisher) as second:
            assert _until(second, set(expected(manager))) > seen
            _use(manager, 30, seed=2)
            _until(second, set(expected(manager)))
            second.kill()
        follow(reader, held, expected(manager))
    assert first.returncode == -signal.SIGKILL


def test_nonsense_on_the_replay_socket_does_no_harm(publish: Any) -> None:
    manager, publisher = publish()
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(publisher.replay_endpoint)
        for frames in ([b""], [b"x", b"y"], [b"", b"123"], [b"", b"", b"", b""], [b"", b"\xff" * 8]):
            asking.send_multipart(frames)
        assert asking.poll(10_000)
        _, _, number, payload = asking.recv_multipart()
        assert number == (publisher.counts["batches"] - 1).to_bytes(8, "big"), "a number of another life: all is told"
        assert payload
    _use(manager, 10)
    with _reading(publisher) as reader:
        follow(reader, {}, expected(manager))


def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, publish: Any) -> None:
    monkeypatch.setattr("inlay.serve.kv_wire._BYTES", 5_000)
    manager, publisher = publish(heartbeat=60)
    _use(manager, 300, pause=0.001)
    assert sum(len(payload) for _, payload in publisher._kept) <= 5_000
    assert publisher.counts["batches"] > len(publisher._kept) > 1
    with _reading(publisher) as reader:
        follow(reader, {}, expected(manager))


def test_closing_publishes_what_there_is_and_ends_at_once() -> None:
    log = Log()
    manager = Manager([20], SIZE, log.add)
    publisher = Publisher(log, SIZE, heartbeat=60)
    held: Held = {}
    with _reading(publisher) as reader:
        follow(reader, held, {})
        _use(manager, 50)
        publisher.close()
        assert not publisher._thread.is_alive()
        while reader._in.poll(500):
            for batch in reader.read():
                apply(held, batch.events)
        assert held == expected(manager)
    publisher.close()
    assert not log._wake
    log.add(Stored(None, 1, (1, 2, 3, 4), "", 0, 0))


def test_mistakes_are_sentences(publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, publisher = publish()
    with pytest.raises(UsageError, match=r"Cannot bind tcp://127\.0\.0\.1:"):
        Publisher(Log(), SIZE, bind=publisher.endpoint)
    with pytest.raises(UsageError, match=r"There is no encoding 'maps'\. Did you mean map\?"):
        Publisher(Log(), SIZE, encoding="maps")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UsageError, match=r"pip install 'inlay\[events\]'"):
        Publisher(Log(), SIZE)
