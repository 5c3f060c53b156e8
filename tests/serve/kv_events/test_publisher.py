"""The KV-cache wire: what is published is read, whole and in order, also by those who were slow, late or killed."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from inlay.errors import UsageError
from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.events import EventLog, RemovedEvent, StoredEvent
from inlay.serve.kv_events.publisher import Publisher
from inlay.serve.kv_events.subscriber import Reader
from inlay.serve.kv_events.wire_format import END_OF_REPLAY
from tests.serve.kv_events.published_cache import SIZE, Held, apply, expected, follow, publishing, reading, use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


pytestmark = pytest.mark.fast


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
def publish() -> Iterator[Callable[..., tuple[BlockManager, Publisher]]]:
    """A cache that is published, until the test ends."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(publishing(*args, **options))


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches, also where the publisher gets no processor while the cache is used."""
    monkeypatch.setattr("inlay.serve.kv_events.publisher._EVENTS", 20)


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_what_is_published_is_what_is_held(publish: Any, encoding: str) -> None:
    manager, publisher = publish((5, 6, 7), encoding=encoding, rank=3)
    held: Held = {}
    with reading(publisher) as reader:
        for seed in range(5):
            use(manager, 100, seed)
            batches = follow(reader, held, expected(manager))
            assert not any(batch.has_gap for batch in batches)
            assert all(batch.rank == 3 for batch in batches)
        assert {medium for _, _, medium, _ in held.values()} == {"GPU", "CPU", "STORAGE"}
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
        use(manager, 50)
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
            if number == END_OF_REPLAY:
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
    with reading(publisher) as reader:
        follow(reader, held, {})
        for seed in range(5):
            before = publisher.counts["replays"]
            use(manager, 20, seed)
            assert reader._in.poll(10_000)
            lost = int.from_bytes(reader._in.recv_multipart()[1], "big")
            batches = follow(reader, held, expected(manager))
            assert lost in [batch.number for batch in batches]
            assert not any(batch.has_gap for batch in batches)
            assert publisher.counts["replays"] == before + 1


def test_a_loss_before_a_quiet_time_is_noticed(publish: Any) -> None:
    """Nothing happens after it, and still it is known before long."""
    manager, publisher = publish(heartbeat=0.3)
    held: Held = {}
    with reading(publisher) as reader:
        follow(reader, held, {})
        use(manager, 20)
        while publisher.counts["events"] < publisher._log.next - 1:  # the first one came before it
            time.sleep(0.01)
        while reader._in.poll(50):
            reader._in.recv_multipart()
        *missed, last = follow(reader, held, expected(manager))
        assert missed[0].events
        assert not last.events, "the empty one by which it was noticed"


@pytest.mark.usefixtures("small_batches")
def test_one_who_comes_late_knows_all(publish: Any) -> None:
    manager, publisher = publish(heartbeat=60)
    _publish_many(manager, publisher)
    held: Held = {}
    with reading(publisher) as reader:
        batches = follow(reader, held, expected(manager))
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert len(batches) > 5


def test_a_long_past_is_had_whole(publish: Any) -> None:
    """More batches than ZeroMQ keeps for a reader unless it is told to."""
    manager, publisher = publish(heartbeat=0.0)
    use(manager, 50)
    while publisher.counts["batches"] < 4_000:
        time.sleep(0.01)
    held: Held = {}
    with reading(publisher) as reader:
        batches = reader.read(10)
        for batch in batches:
            apply(held, batch.events)
    assert held == expected(manager)
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert len(batches) >= 4_000


@pytest.mark.usefixtures("small_batches")
def test_one_who_comes_too_late_is_told_and_knows_all(publish: Any) -> None:
    """What it would have to read is not kept any more: it gets one batch that holds everything."""
    manager, publisher = publish(most=3, heartbeat=2)
    _publish_many(manager, publisher, salts=("", "mine"))
    held: Held = {}
    with reading(publisher) as reader:
        published = publisher.counts["batches"]
        batch, *rest = follow(reader, held, expected(manager))
        assert batch.has_gap
        assert not any(each.events or each.has_gap for each in rest)
        assert batch.events[0] == {"type": "AllBlocksCleared"}
        assert published - 1 <= batch.number < publisher.counts["batches"]
        use(manager, 3, seed=1)
        assert not any(batch.has_gap for batch in follow(reader, held, expected(manager)))


def test_without_replay_a_gap_is_told(publish: Any) -> None:
    manager, publisher = publish(replay=None)
    assert publisher.replay_endpoint is None
    with Reader(publisher.endpoint) as reader:
        numbers: list[tuple[int, bool]] = []
        for _ in range(3):
            use(manager, 5)
            assert reader._in.poll(10_000)
            numbers += [(batch.number, batch.has_gap) for batch in reader.read(1)]
            assert reader._in.poll(10_000)
            reader._in.recv_multipart()
        numbers += [(batch.number, batch.has_gap) for batch in reader.read(1)]
    found = [number for number, _ in numbers]
    assert found == sorted(set(found))
    for (before, _), (number, gap) in pairwise(numbers):
        assert gap == (number != before + 1)
    assert sum(gap for _, gap in numbers) >= 3


@pytest.mark.parametrize("ahead", [-3, 0, 3])
def test_a_publisher_that_is_started_again_is_noticed(ahead: int) -> None:
    """Also when it has published as many batches as the one before it, or more, when it is heard for the first time."""
    log, held = EventLog(), Held()
    manager = BlockManager([20], SIZE, log.add)
    with Publisher(log, SIZE, heartbeat=60) as first, reading(first) as reader:
        use(manager, 50)
        for _ in range(4):
            _one_batch(log, first)
        follow(reader, held, expected(manager))
        while reader._last is None or reader._last.number + 1 < first.counts["batches"]:
            reader.read(0.1)
        first.close()
        log = EventLog()
        manager = BlockManager([20], SIZE, log.add)
        use(manager, 50, seed=1)
        assert first.replay_endpoint is not None
        with Publisher(log, SIZE, heartbeat=60, bind=first.endpoint, replay=first.replay_endpoint) as second:
            while second.counts["batches"] < first.counts["batches"] + ahead:
                _one_batch(log, second)
            assert reader.read(1) == [], "it connects again, and has heard nothing of this"
            batches: list[Any] = []
            while not batches:
                _one_batch(log, second)
                batches = reader.read(0.5)
            for batch in batches:
                apply(held, batch.events)
            batches += follow(reader, held, expected(manager))
    assert [batch.has_gap for batch in batches] == [True] + [False] * (len(batches) - 1)
    assert batches[0].events[0] == {"type": "AllBlocksCleared"}


def _publish_many(manager: BlockManager, publisher: Publisher, **options: Any) -> None:
    """Use a cache, and wait until all of its events are published."""
    while not publisher.counts["batches"]:
        time.sleep(0.01)
    before = publisher._log.next  # these are in the first batch
    use(manager, 200, **options)
    while publisher.counts["events"] < publisher._log.next - before:
        time.sleep(0.01)


def _one_batch(log: EventLog, publisher: Publisher) -> None:
    """Let something happen that is published by itself."""
    before = publisher.counts["batches"]
    log.add(StoredEvent(None, 1, (1, 2, 3, 4), "", 0, 0))
    log.add(RemovedEvent(1, 0))
    while publisher.counts["batches"] == before:
        time.sleep(0.01)


def test_a_publisher_that_is_too_slow_says_what_is_held_now(publish: Any) -> None:
    log = EventLog(most=5)
    manager, publisher = publish(log=log)
    held: Held = {}
    with reading(publisher) as reader:
        follow(reader, held, {})
        use(manager, 100)
        batches = follow(reader, held, expected(manager))
    assert publisher.counts["gaps"] >= 1
    assert any(event["type"] == "AllBlocksCleared" for batch in batches for event in batch.events)
    assert not any(batch.has_gap for batch in batches), "the wire itself lost nothing"


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_blocks_with_a_salt_are_told_apart(publish: Any, encoding: str) -> None:
    """Equal tokens under three salts are three blocks, and a router can tell whose each is."""
    manager, publisher = publish((4, 6), encoding=encoding)
    held: Held = {}
    with reading(publisher) as reader:
        for seed in range(5):
            use(manager, 40, seed, salts=("", "mine", "yours"))
            follow(reader, held, expected(manager))
    assert {salt for *_, salt in held.values()} == {"", "mine", "yours"}


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
    use(manager, 10)
    with reading(publisher) as reader:
        follow(reader, {}, expected(manager))


@pytest.mark.usefixtures("small_batches")
def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, publish: Any) -> None:
    monkeypatch.setattr("inlay.serve.kv_events.publisher._BYTES", 5_000)
    manager, publisher = publish(heartbeat=60)
    _publish_many(manager, publisher)
    assert sum(len(payload) for _, payload in publisher._replay_buffer) <= 5_000
    assert publisher.counts["batches"] > len(publisher._replay_buffer) > 1
    with reading(publisher) as reader:
        follow(reader, {}, expected(manager))


def test_closing_publishes_what_there_is_and_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.serve.kv_events.publisher._COLLECT", 3.0)  # so there is more than goes into one batch
    log = EventLog()
    manager = BlockManager([20], SIZE, log.add)
    publisher = Publisher(log, SIZE, heartbeat=60)
    held: Held = {}
    with reading(publisher) as reader:
        follow(reader, held, {})
        use(manager, 600)
        assert publisher.counts["events"] < log.next - 1_100
        publisher.close()
        assert not publisher._thread.is_alive()
        while reader._in.poll(500):
            for batch in reader.read():
                apply(held, batch.events)
        assert held == expected(manager)
    publisher.close()
    assert not log._wake
    log.add(StoredEvent(None, 1, (1, 2, 3, 4), "", 0, 0))


def test_mistakes_are_sentences(publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, publisher = publish()
    with pytest.raises(UsageError, match=r"Cannot bind tcp://127\.0\.0\.1:"):
        Publisher(EventLog(), SIZE, bind=publisher.endpoint)
    with pytest.raises(UsageError, match=r"Unknown encoding 'maps'\. Did you mean map\?"):
        Publisher(EventLog(), SIZE, encoding="maps")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UsageError, match=r"pip install 'inlay\[events\]'"):
        Publisher(EventLog(), SIZE)
