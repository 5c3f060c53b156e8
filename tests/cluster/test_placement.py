"""Placement in one ingress: load, replicas that went silent, and a selector that fails, is slow or is behind."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from inlay.cluster import placement as placements
from inlay.cluster.placement import Fleet, Placement
from inlay.cluster.selector import EngineAddress, Selection
from inlay.runtime.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.fast
ADDRESSES = {name: EngineAddress(name, f"tcp://{name}", f"tcp://{name}-replay", 32) for name in ("one", "two", "three")}
ASKED = Request((1, 2, 3), max_tokens=5)


class _Method:
    """A method of an actor."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *arguments: Any) -> Any:
        self._actor.calls.append((self._name, arguments))
        return self._answer() if self._name in ("select", "update") else None

    async def _answer(self) -> Selection | None:
        if self._actor.error is not None:
            raise self._actor.error
        await asyncio.sleep(self._actor.seconds)
        return self._actor.answer


class Actor:
    """Stands for Ray's handle of the selector, which needs a Ray cluster; the selector itself has its own test."""

    def __init__(self, answer: Selection | None = None) -> None:
        self.answer, self.seconds = answer, 0.0
        self.error: Exception | None = None
        self.calls: list[tuple[str, Sequence[Any]]] = []

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)


def rank(fleet: Fleet, load: int = 10, avoid: frozenset[str] = frozenset()) -> Placement:
    """Place one request; it is accepted by the first choice."""
    placement = Placement("id", "text", fleet=fleet, avoid=avoid, load=load)
    asyncio.run(fleet.choose(placement, ASKED, ADDRESSES, ADDRESSES))
    fleet.accept(placement)
    return placement


def test_the_least_loaded_replica_is_chosen_and_loads_end() -> None:
    fleet = Fleet("least_loaded", Actor)
    held = [rank(fleet) for _ in range(30)]
    assert Counter(each.replica for each in held) == dict.fromkeys(ADDRESSES, 10)
    for each in held:
        if each.replica == "two":
            fleet.end(each)
    assert {rank(fleet).replica for _ in range(10)} == {"two"}
    late = held[0]
    fleet.end(late)
    fleet.charge(late, "one")  # the router may come back after the end
    assert late.replica is None


@pytest.mark.parametrize("policy", ["kv", "least_loaded", "random"])
def test_a_replica_without_room_is_chosen_again_after_the_others(policy: str) -> None:
    fleet = Fleet(policy, lambda: Actor(Selection("two", 64)))
    placement = Placement("id", "text", fleet=fleet, load=10)

    async def choose(times: int) -> list[str]:
        return [await fleet.choose(placement, ASKED, ADDRESSES, ADDRESSES) for _ in range(times)]

    first, again = asyncio.run(choose(3)), asyncio.run(choose(3))
    assert set(first) == set(again) == set(ADDRESSES)
    assert placement.replica == again[-1]
    if policy == "kv":
        assert (first[0], again[0]) == ("two", "two")
        assert (placement.policy, placement.predicted_tokens) == ("least_loaded", None)
    fleet.end(placement)
    if policy == "least_loaded":
        assert {rank(fleet).replica for _ in range(3)} == set(ADDRESSES), "no load of it is left"


def test_only_replicas_that_fit_are_chosen() -> None:
    """Others stay known to the selector: it would forget their caches otherwise."""
    actor = Actor(Selection("two", 64))
    fleet = Fleet("kv", lambda: actor)
    placement = Placement("id", "text", fleet=fleet)
    chosen = asyncio.run(fleet.choose(placement, ASKED, ADDRESSES, ["one", "three"]))
    assert chosen in ("one", "three"), "the answer of a selector that knows other replicas is not used"
    assert placement.policy == "least_loaded"
    rank(fleet)
    assert [name for name, _ in actor.calls] == ["update", "select", "select"]
    assert actor.calls[1][1][3] == {"two"}


def test_a_silent_replica_gets_nothing_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet("least_loaded", Actor)
    fleet.suspect("one")
    assert "one" not in {rank(fleet).replica for _ in range(12)}
    assert rank(fleet, avoid=frozenset({"one", "two"})).replica == "three"
    assert rank(fleet, avoid=frozenset(ADDRESSES)).replica is not None, "with no other, all are tried again"
    monkeypatch.setattr(placements, "monotonic", lambda: placements.SUSPICION * 1e6)
    assert "one" in {rank(fleet).replica for _ in range(12)}


def test_the_selector_decides_and_is_told() -> None:
    actor = Actor(Selection("three", 64))
    fleet = Fleet("kv", lambda: actor)
    placement = rank(fleet)
    assert (placement.replica, placement.policy, placement.predicted_tokens) == ("three", "kv", 64)
    assert [name for name, _ in actor.calls] == ["update", "select"]
    assert actor.calls[1][1] == ("id", (1, 2, 3), "", set(), 5)
    rank(fleet)
    assert [name for name, _ in actor.calls] == ["update", "select", "select"], "an unchanged fleet is told once"
    assert fleet.counts["placements.kv"] == 2
    assert rank(fleet, avoid=frozenset({"three"})) is not None
    assert actor.calls[-1][1][3] == {"three"}, "it chooses among the others"


@pytest.mark.parametrize("kind", ["failed", "timeout"])
def test_without_an_answer_the_least_loaded_is_chosen_and_the_selector_rests(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, connections = Actor(Selection("three", 0)), list[int]()
    if kind == "failed":
        actor.error = RuntimeError("the actor is dead")
    else:
        monkeypatch.setattr(placements, "SELECT_SECONDS", 0.01)
        actor.seconds = 30.0

    def connect() -> Actor:
        connections.append(1)
        return actor

    now = [100.0]
    monkeypatch.setattr(placements, "monotonic", lambda: now[0])
    fleet = Fleet("kv", connect)
    assert rank(fleet).policy == "least_loaded"
    asked = len(actor.calls)
    assert rank(fleet).policy == "least_loaded"
    assert len(actor.calls) > asked, "one failure may be chance, and what fails at once is one failure"
    now[0] += 1.0
    assert rank(fleet).policy == "least_loaded"
    asked = len(actor.calls)
    assert rank(fleet).policy == "least_loaded"
    assert len(actor.calls) == asked, "it is not asked while it rests"
    assert fleet.counts[f"selector_failures.{kind}"] == 3
    actor.error, actor.seconds = None, 0.0
    now[0] += 10.0
    assert rank(fleet).policy == "kv"
    assert len(connections) == (4 if kind == "failed" else 1), "after a failure, a new actor may have another handle"


def test_a_slow_selector_is_told_what_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has reserved load for the request, although its answer came too late."""
    monkeypatch.setattr(placements, "SELECT_SECONDS", 0.01)
    actor = Actor(Selection("three", 0))
    actor.seconds = 30.0
    fleet = Fleet("kv", lambda: actor)
    late = rank(fleet)
    fleet.end(late)
    assert actor.calls[-1] == ("release", ("id",))


def test_a_failure_of_one_request_is_none_of_another() -> None:
    """One request fails while the other tells the selector about a new worker, and then asks it."""
    actor = Actor(Selection("three", 64))
    fleet = Fleet("kv", lambda: actor)
    rank(fleet)
    fails, asks = Placement("fails", "text", fleet=fleet), Placement("asks", "text", fleet=fleet)

    async def both() -> None:
        actor.seconds = 0.05
        asking = asyncio.ensure_future(fleet.choose(asks, ASKED, {**ADDRESSES, "four": ADDRESSES["one"]}, ADDRESSES))
        await asyncio.sleep(0.01)  # its update is under way
        actor.error = RuntimeError("no answer for this one")
        await fleet.choose(fails, ASKED, ADDRESSES, ADDRESSES)
        actor.error = None
        await asking

    asyncio.run(both())
    assert (fails.policy, asks.policy) == ("least_loaded", "kv")
    assert fleet.counts["selector_failures.failed"] == 1


def test_a_selector_that_is_behind_rests() -> None:
    fleet = Fleet("kv", lambda: Actor(Selection("one", 640)))
    for _ in range(100):
        placement = rank(fleet)
        if placement.policy != "kv":
            break
        fleet.start_decode(placement, cached=0, block_size=32)
        fleet.end(placement)
    assert fleet.counts["selector_failures.behind"] == 1


def test_a_selector_that_knows_less_or_the_same_does_not_rest() -> None:
    """Requests that arrive at once find more in the cache than was there when they were placed."""
    fleet = Fleet("kv", lambda: Actor(Selection("one", 64)))
    for number in range(200):
        placement = rank(fleet)
        assert placement.policy == "kv"
        fleet.start_decode(placement, cached=64 + number % 2 * 640, block_size=32)
        fleet.end(placement)


def test_what_is_sent_to_a_replica_holds_nothing_of_this_process() -> None:
    fleet = Fleet("kv", Actor)
    sent = pickle.loads(pickle.dumps(Placement("id", "text", "package", {"traceparent": "x"}, fleet=fleet)))
    assert (sent.request_id, sent.text, sent.package, sent.trace) == ("id", "text", "package", {"traceparent": "x"})
    assert sent.fleet is None
