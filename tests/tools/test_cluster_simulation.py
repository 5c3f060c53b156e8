"""The simulated cluster: its replicas take the steps of a real engine, and no request is lost or answered twice."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tools.cluster_simulation.__main__ import simulate
from tools.cluster_simulation.engine import SimulatedEngine
from tools.cluster_simulation.event_feed import MOST_LOCAL, EventFeed, new_selector
from tools.cluster_simulation.policies import KVAwarePolicy, Policy, new_policy
from tools.cluster_simulation.record import engine_shape
from tools.cluster_simulation.report import draw
from tools.cluster_simulation.simulation import ClusterShape, Simulation
from tools.cluster_simulation.step_times import EngineShape, Recording, StepTimes
from tools.cluster_simulation.workload import AGENT, CHAT, Workload, WorkloadShape

from inlay.runtime.engine import Engine
from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.request import Request
from inlay.runtime.settings import EngineSettings

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tools.cluster_simulation.engine import SimulatedSequence
    from tools.cluster_simulation.measurements import ClientRequest

    from inlay.runtime.kv.events import CacheEvent
    from inlay.runtime.request import RequestHandle

pytestmark = pytest.mark.fast

TIMES = StepTimes(
    decode_base=(0.0, 0.011, 0.013, 0.016, 0.018),
    decode_row=(0.0, 1e-6, 1.1e-6, 1.2e-6, 1.3e-6),
    chunks=(1, 64, 512),
    starts=(0, 1024),
    chunk_seconds=((0.012, 0.014), (0.07, 0.09), (0.5, 0.7)),
    load_block=2e-4,
    request_seconds=0.003,
)
SHAPE = EngineShape(slots=4, max_seq_len=1024, block_size=16, cache_blocks=128, max_waiting=8)
RECORDING = Recording(SHAPE, TIMES)
FEW: dict[str, tuple[WorkloadShape, float]] = {
    "chat": (replace(CHAT, prefixes=8, prefix_tokens=(100, 200), pause=1.0), 1.5),
    "agent": (replace(AGENT, prefixes=6, prefix_tokens=(100, 300)), 1.0),
}


def _workload(name: str, seed: int = 0, seconds: float = 20.0) -> Workload:
    shape, rate = FEW[name]
    return Workload(shape, rate, seconds, seed, room=SHAPE.max_seq_len)


def _run(
    recording: Recording,
    cluster: ClusterShape,
    workload: Workload,
    policy: str | Callable[[Callable[[], float]], Policy] = "round_robin",
) -> tuple[dict[str, Any], list[ClientRequest]]:
    """What was measured, and the requests in the order in which they ended."""
    ended: list[ClientRequest] = []

    def named(clock: Callable[[], float]) -> Policy:
        return new_policy(str(policy), workload.seed, recording.shape.block_size, cluster.replicas, clock)

    made = named if isinstance(policy, str) else policy
    measured = asyncio.run(Simulation(recording, cluster, workload, made, on_end=ended.append).run())
    return {**measured.summary(), "gaps": sorted(measured.gaps.items()), "course": measured.course()}, ended


def _view(asked: ClientRequest) -> tuple[Any, ...]:
    """What a client has seen of a request."""
    return (asked.id, asked.replica, asked.attempts, asked.cached, asked.arrival, asked.first_token, asked.last_token)


def _state(engine: Engine | SimulatedEngine) -> tuple[Any, ...]:
    """Which requests wait and run, how far the running ones are, and what was computed and reused."""
    waiting: dict[int, Any]
    running: dict[int, Any]
    counts: Counter[str]
    if isinstance(engine, Engine):
        waiting, running, counts = engine._waiting, engine._running, engine._counts
    else:
        waiting, running, counts = {**engine.waiting}, {**engine.running}, engine.counts
    rows = [
        (number, each.slot, each.computed_tokens, each.generation.left, len(each.blocks), each.is_cache_full)
        for number, each in running.items()
    ]
    names = ("prompt_tokens", "generation_tokens", "cached_tokens", "prefix_cache_hits", "fallback.cache_full")
    return list(waiting), rows, [counts[name] for name in names]


def _requests(seed: int) -> list[tuple[int, Request]]:
    """Requests with common beginnings, priorities and tenants, and the steps before which they arrive."""
    rng = random.Random(seed)
    shared = rng.choices(range(3, 256), k=80)
    return sorted(
        (
            (
                rng.randrange(120),
                Request(
                    (*shared[: rng.choice([0, 20, 50, 80])], *rng.choices(range(3, 256), k=rng.randint(1, 90))),
                    max_tokens=rng.randint(1, 40),
                    ignore_eos=True,
                    priority=rng.choice([0, 0, 1]),
                    owner=rng.choice(["", "a", "b"]),
                    salt=rng.choice(["", "tenant"]),
                ),
            )
            for _ in range(20)
        ),
        key=lambda each: each[0],
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Idle threads of OpenMP would spin on cores that other tests need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_generated_stored", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_replica_takes_the_steps_of_a_real_engine(package: Path, seed: int, is_generated_stored: bool) -> None:
    settings = EngineSettings(
        block_size=8,
        speculation=0,  # the simulator drafts no tokens
        max_prefill_tokens=16,
        max_prefill_only_tokens=40,
        cache_bytes=120_000,
        host_bytes=60_000 * (seed % 2),
    )
    engine = Engine.open(package, settings)
    engine._prefix_cache._can_store_generated = is_generated_stored
    due, arrivals = _requests(seed), _requests(seed)
    states: list[Any] = []
    handles: list[RequestHandle] = []
    while due or engine._running or engine._waiting:
        while due and due[0][0] <= len(states):
            handles.append(engine.submit(due.pop(0)[1]))
        engine.step()
        states.append(_state(engine))
    answers = [[piece.token for piece in handle] for handle in handles]
    assert engine.cache is not None
    events: list[CacheEvent] = []
    simulated = SimulatedEngine(engine_shape(engine), replace(TIMES, decode_base=(0.01,) * 9), events.append)
    submitted: list[SimulatedSequence] = []
    for number, state in enumerate(states):
        while arrivals and arrivals[0][0] <= number:
            submitted.append(simulated.submit(arrivals.pop(0)[1], answers[len(submitted)]))
        step = simulated.step(0.0, 1)
        if step is not None:
            simulated.complete(step, 1)
        assert _state(simulated) == state, number
    assert [each.handle.cached_tokens for each in submitted] == [each.cached_tokens for each in handles]
    assert [event for _, event in engine.event_log.read(0)] == events
    assert simulated.counts["cached_tokens"] > 0
    assert {type(event).__name__ for event in events} >= {"StoredEvent", "RemovedEvent"}
    engine.close()


@pytest.mark.parametrize("is_generated_stored", [False, True])
@pytest.mark.parametrize("name", FEW)
def test_several_steps_in_one_event_change_nothing(name: str, is_generated_stored: bool) -> None:
    recording = Recording(replace(SHAPE, can_store_generated=is_generated_stored), TIMES)
    cluster = ClusterShape(3, mean_seconds_to_failure=15.0, start_seconds=2.0)
    together, ended = _run(recording, cluster, _workload(name))
    alone, ended_alone = _run(recording, replace(cluster, most_steps=1), _workload(name))
    assert together["failures"] > 2
    assert together["repeated_tokens"] > 0
    assert str(together) == str(alone)  # not a number equals itself in text
    assert list(map(_view, ended)) == list(map(_view, ended_alone))


@pytest.mark.parametrize("policy", ["random", "round_robin", "least_loaded"])
def test_the_same_seed_gives_the_same_result(policy: str) -> None:
    cluster = ClusterShape(3, mean_seconds_to_failure=15.0, start_seconds=2.0)
    first, second, other = (_run(RECORDING, cluster, _workload("chat", seed), policy) for seed in (1, 1, 2))
    assert str(first[0]) == str(second[0])
    assert list(map(_view, first[1])) == list(map(_view, second[1]))
    assert str(first[0]) != str(other[0])


class _Recorded(KVAwarePolicy):
    """Notes what the selection service chose, because it breaks ties at random."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(0, SHAPE.block_size, 3, clock)
        self.chosen: list[str] = []

    async def choose(self, key: str, request: Request, names: Sequence[str]) -> str:
        self.chosen.append(await super().choose(key, request, names))
        return self.chosen[-1]


class _Repeated(Policy):
    def __init__(self, chosen: Sequence[str]) -> None:
        super().__init__(0)
        self._chosen = iter(chosen)

    async def choose(self, key: str, request: Request, names: Sequence[str]) -> str:
        return next(self._chosen)


def test_the_selection_service_decides_nothing_but_the_replica() -> None:
    pytest.importorskip("dynamo.llm")
    cluster = ClusterShape(3, mean_seconds_to_failure=15.0, start_seconds=2.0)
    policies: list[_Recorded] = []

    def new(clock: Callable[[], float]) -> Policy:
        policies.append(_Recorded(clock))
        return policies[-1]

    first, _ = _run(RECORDING, cluster, _workload("agent"), new)
    second, _ = _run(RECORDING, cluster, _workload("agent"), lambda clock: _Repeated(policies[0].chosen))
    assert str(first) == str(second)
    assert first["failures"] > 2
    assert policies[0].counts["selections_failed"] == 0


@pytest.mark.parametrize("replicas", [2, MOST_LOCAL + 1])
def test_virtual_time_waits_until_the_service_has_all_events(replicas: int) -> None:
    """With many replicas, publishers have a process of their own."""
    pytest.importorskip("dynamo.llm")
    rng = random.Random(0)

    async def follow() -> None:
        selector = new_selector(lambda: 0.0)
        feed = EventFeed(selector, 4, replicas)
        new: dict[str, list[CacheEvent]] = {name: [] for name in ("first", "second")}
        caches = {name: BlockManager([20], 4, events.append) for name, events in new.items()}
        await feed.open({name: list(events) for name, events in new.items()})
        new["first"].clear()
        new["second"].clear()
        prompts = [[rng.randrange(9) for _ in range(20)] for _ in range(12)]
        for number in range(30):
            name, prompt = rng.choice(list(caches)), rng.choice(prompts)
            parent = None
            for start in range(0, 20, 4):
                placed = caches[name].store(parent, tuple(prompt[start : start + 4]))
                assert placed is not None
                parent = placed.block
            await feed.sync({name: list(events) for name, events in new.items() if events})
            new["first"].clear()
            new["second"].clear()
            for each, cache in caches.items():
                asked = rng.choice(prompts)
                found = await selector.select(f"{number} {each}", asked, "", caches.keys() - {each}, 1)
                assert found is not None
                assert found.cached_tokens == 4 * len(cache.lookup(asked))
        feed.stop()
        selector.close()

    asyncio.run(follow())


@pytest.mark.parametrize("policy", ["random", "least_loaded", "kv_aware"])
@pytest.mark.parametrize("name", FEW)
def test_every_request_ends_once_with_all_its_tokens(name: str, policy: str) -> None:
    if policy == "kv_aware":
        pytest.importorskip("dynamo.llm")
    cluster = ClusterShape(3, mean_seconds_to_failure=10.0, start_seconds=3.0)
    found, ended = _run(RECORDING, cluster, _workload(name, seed=3), policy)
    assert len(ended) > 30
    assert sorted(each.id for each in ended) == list(range(len(ended)))
    assert all(each.delivered == each.request.max_tokens for each in ended)
    assert any(each.attempts > 1 for each in ended)
    assert found["retried"] > 0
    assert all(each.arrival < each.first_token <= each.last_token for each in ended)
    assert all(each.cached < len(each.request.prompt) for each in ended)


def test_turns_of_a_session_come_one_after_the_other() -> None:
    _, ended = _run(RECORDING, ClusterShape(2, must_complete_sessions=True), _workload("chat"))
    sessions: dict[int, list[ClientRequest]] = {}
    for each in sorted(ended, key=lambda each: each.id):
        sessions.setdefault(each.session.number, []).append(each)
    assert any(len(turns) > 2 for turns in sessions.values())
    for turns in sessions.values():
        for first, second in itertools.pairwise(turns):
            assert first.last_token <= second.arrival
            before = (*first.request.prompt, *first.answer)
            assert second.request.prompt[: len(before)] == before


def test_kv_aware_selection_reuses_more_where_no_cache_has_room_for_all_prefixes() -> None:
    pytest.importorskip("dynamo.llm")
    shape = replace(CHAT, prefixes=24, prefix_tokens=(300, 400), popularity=0.0, turns=(1, 2), pause=0.5)
    workload = Workload(shape, 3.0, 40.0, room=SHAPE.max_seq_len)  # prefixes have 500 blocks, each cache 128
    shares = {
        policy: simulate(RECORDING, ClusterShape(4), workload, policy)["summary"]["cached_share"]
        for policy in ("random", "kv_aware")
    }
    assert shares["kv_aware"] > 1.3 * shares["random"]


def test_kv_aware_selection_reuses_nothing_where_nothing_is_shared() -> None:
    pytest.importorskip("dynamo.llm")
    shape = replace(CHAT, prefixes=1, prefix_tokens=(0, 0), turns=(1, 1), input_tokens=(50, 300))
    workload = Workload(shape, 3.0, 20.0, room=SHAPE.max_seq_len)
    for policy in ("random", "kv_aware"):
        summary = simulate(RECORDING, ClusterShape(4), workload, policy)["summary"]
        assert summary["requests"] > 30
        assert summary["cached_tokens"] == 0


def test_a_result_is_drawn_as_a_picture() -> None:
    results = {"random": simulate(RECORDING, ClusterShape(2), _workload("chat", seconds=5.0), "random")}
    picture = draw(results, "two replicas")
    assert picture.startswith("<svg")
    assert "time to first token, p50" in picture
    assert "nan" not in picture
