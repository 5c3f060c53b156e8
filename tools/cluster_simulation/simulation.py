"""The cluster in virtual time: a heap of events for sessions, replicas, failures and KV events."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from tools.cluster_simulation.engine import SimulatedEngine
from tools.cluster_simulation.measurements import ClientRequest, Measurements

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.runtime.kv.events import CacheEvent
    from tools.cluster_simulation.engine import SimulatedSequence, Step
    from tools.cluster_simulation.policies import Policy
    from tools.cluster_simulation.step_times import Recording
    from tools.cluster_simulation.workload import Session, Workload

# Kinds of events, in the order in which they happen at equal times.
ARRIVAL, TURN, PLACE, QUEUE, TOKENS, STEP, SYNC, FAILURE, RESTART, SAMPLE = range(10)


@dataclass(frozen=True)
class ClusterShape:
    """The cluster and its failures."""

    replicas: int
    mean_seconds_to_failure: float = 0.0
    """Mean life of a replica; exponentially distributed. 0: no failures."""
    start_seconds: float = 30.0
    """Time from the failure of a replica until it serves again, with an empty cache."""
    retry_seconds: float = 0.1
    """Time until a client's request that lost its replica is placed again."""
    sync_seconds: float = 0.05
    """Interval at which KV events reach the selection service. Their mean delay is half of it."""
    sample_seconds: float = 1.0
    most_steps: int = 1_000_000
    """Most decode steps in one event. 1 computes step by step."""
    must_complete_sessions: bool = False
    """Whether sessions that arrived in time take all their turns, however late."""


@dataclass(eq=False)
class Replica:
    """A replica of the cluster."""

    name: str
    number: int
    engine: SimulatedEngine
    is_alive: bool = True
    step: Step | None = None
    """The step under way."""
    busy_since: float = 0.0
    version: int = 0
    """Incremented when events that were scheduled for it become invalid."""
    new_events: list[CacheEvent] = field(default_factory=list)
    """KV events of the step under way."""
    known: dict[SimulatedSequence, ClientRequest] = field(default_factory=dict)
    """The requests that it has."""


class Simulation:
    """One run. `await run()` returns the measurements."""

    def __init__(
        self,
        recording: Recording,
        cluster: ClusterShape,
        workload: Workload,
        new_policy: Callable[[Callable[[], float]], Policy],
        *,
        warmup: float = 0.0,
        on_end: Callable[[ClientRequest], None] = lambda asked: None,
    ) -> None:
        """`on_end` is called for each request that ended."""
        self._recording, self._cluster, self._workload = recording, cluster, workload
        self.now = 0.0
        self.measurements = Measurements(warmup, workload.seconds)
        self.policy = new_policy(lambda: self.now)
        self._on_end = on_end
        self._heap: list[tuple[float, int, int, int, Any]] = []
        self._pushed = self._asked = self._work = 0
        self._rng = random.Random(f"{workload.seed} failures")
        self._changed: dict[str, list[CacheEvent]] = {}
        self._replicas = [self._replica(number) for number in range(cluster.replicas)]
        self._by_name = {each.name: each for each in self._replicas}
        self._alive = [each.name for each in self._replicas]
        self._sessions = workload.sessions()

    async def run(self) -> Measurements:
        """Simulate until all requests have ended."""
        try:
            await self._open(self._replicas)
            self._start()
            while self._work:
                self.now, kind, number, _, what = heappop(self._heap)
                await self._handle(kind, number, what)
        finally:
            self.policy.stop()
        return self.measurements

    async def _open(self, replicas: list[Replica]) -> None:
        """Tell the policy about new replicas and the first events of their caches."""
        await self.policy.open({each.name: list(each.new_events) for each in replicas})
        for each in replicas:
            each.new_events.clear()

    def _start(self) -> None:
        self._next_arrival()
        cluster = self._cluster
        self._push(0.0, SAMPLE, 0)
        if self.policy.has_events:
            self._push(cluster.sync_seconds, SYNC, 0)
        if cluster.mean_seconds_to_failure:
            for each in self._replicas:
                self._push(self._life(), FAILURE, each.number)

    def _life(self) -> float:
        return self._rng.expovariate(1 / self._cluster.mean_seconds_to_failure)

    def _replica(self, number: int) -> Replica:
        name = f"replica-{number}"
        events: list[CacheEvent] = []
        engine = SimulatedEngine(self._recording.shape, self._recording.times, self._listener(events))
        return Replica(name, number, engine, new_events=events)

    def _listener(self, events: list[CacheEvent]) -> Callable[[CacheEvent], None]:
        return events.append if self.policy.has_events else lambda event: None

    def _push(self, at: float, kind: int, number: int, what: Any = None) -> None:
        self._pushed += 1
        heappush(self._heap, (at, kind, number, self._pushed, what))

    async def _handle(self, kind: int, number: int, what: Any) -> None:
        if kind == STEP:
            await self._end_step(self._replicas[number], what)
        elif kind == TOKENS:
            await self._deliver(self._replicas[number], *what)
        elif kind == TURN:
            self._take_turn(what)
        elif kind == PLACE:
            await self._place(what)
        elif kind == QUEUE:
            await self._queue(*what)
        elif kind == ARRIVAL:
            self._work -= 1
            self._push_work(self.now, TURN, what.number, what)
            self._next_arrival()
        elif kind == SYNC:
            await self._sync()
        elif kind == FAILURE:
            await self._fail(self._replicas[number])
        elif kind == RESTART:
            await self._restart(self._replicas[number])
        elif kind == SAMPLE:
            self._sample()

    # Sessions. `_work` counts arrivals, turns and requests that are still to come or under way.

    def _push_work(self, at: float, kind: int, number: int, what: Any) -> None:
        self._work += 1
        self._push(at, kind, number, what)

    def _next_arrival(self) -> None:
        for at, session in self._sessions:
            self._push_work(at, ARRIVAL, session.number, session)
            return

    def _take_turn(self, session: Session) -> None:
        self._work -= 1
        turn = session.next_turn()
        if turn is None or (self.now >= self._workload.seconds and not self._cluster.must_complete_sessions):
            return
        asked = ClientRequest(self._asked, session, turn[0], turn[1], self.now)
        self._asked += 1
        self.measurements.count("asked", self.now)
        self._push_work(self.now, PLACE, asked.id, asked)

    async def _place(self, asked: ClientRequest) -> None:
        """Choose a replica for a request. It arrives there after the time that HTTP takes."""
        names = self._alive
        if not names:
            self._push(self.now + self._cluster.retry_seconds, PLACE, asked.id, asked)
            return
        asked.attempts += 1
        asked.generated = 0
        asked.replica = await self.policy.choose(str(asked.id), asked.request, names)
        replica = self._by_name[asked.replica]
        self._push(self.now + self._recording.times.request_seconds, QUEUE, asked.id, (asked, replica, replica.engine))

    async def _queue(self, asked: ClientRequest, replica: Replica, engine: SimulatedEngine) -> None:
        if replica.engine is not engine or not replica.is_alive or engine.is_full:
            self.measurements.count("rejected" if replica.is_alive else "retried", self.now)
            await self.policy.release(str(asked.id))
            self._push(self.now + self._cluster.retry_seconds, PLACE, asked.id, asked)
            return
        replica.known[engine.submit(asked.request, asked.answer)] = asked
        if replica.step is None:
            replica.busy_since = self.now
            self._push(self.now, STEP, replica.number, replica.version)
        elif replica.step.run and len(replica.step.ends) > 1 and engine.has_free_slot:
            ends = replica.step.ends  # the step under way is the last one without the new request
            del ends[bisect_left(ends, self.now) + 1 :]
            replica.version += 1
            self._push(ends[-1], STEP, replica.number, replica.version)

    # Replicas.

    async def _end_step(self, replica: Replica, version: int) -> None:
        """End the step under way and begin the next one."""
        if version != replica.version or not replica.is_alive:
            return
        step, replica.step = replica.step, None
        if step is not None and step.run:
            await self._end_run(replica, step, len(step.ends))
        if replica.new_events:
            self._changed.setdefault(replica.name, []).extend(replica.new_events)
            replica.new_events.clear()
        replica.step = step = replica.engine.step(self.now, self._most_steps(replica))
        replica.version += 1
        if step is None:
            self.measurements.busy(replica.busy_since, self.now)
        else:
            for at, sequences in step.outputs:
                told = [(sequence, not sequence.known.left) for sequence in sequences]
                self._push(at, TOKENS, replica.number, (told, replica.version))
            self._push(step.ends[-1], STEP, replica.number, replica.version)

    def _most_steps(self, replica: Replica) -> int:
        """Return how many steps may be planned: a run must not mix repeated tokens and new ones of a request."""
        repeats = [left for asked in replica.known.values() if (left := asked.delivered - asked.generated) > 0]
        return min([self._cluster.most_steps, *repeats])

    async def _end_run(self, replica: Replica, step: Step, count: int) -> None:
        asked = [replica.known[each] for each in step.run]
        replica.engine.complete(step, count)
        self.measurements.run(asked, step.ends[:count])
        for sequence, each in zip(step.run, asked, strict=True):
            if not sequence.known.left:
                await self._finish(replica, sequence, each)

    async def _deliver(self, replica: Replica, told: list[tuple[SimulatedSequence, bool]], version: int) -> None:
        """Deliver the tokens of a step that prefills or admits."""
        if version != replica.version or not replica.is_alive:
            return
        for sequence, is_last in told:
            asked = replica.known[sequence]
            self.measurements.token(asked, self.now)
            if asked.generated == 1:
                asked.cached = sequence.handle.cached_tokens
                await self.policy.start_decode(str(asked.id))
            if is_last:
                await self._finish(replica, sequence, asked)

    async def _finish(self, replica: Replica, sequence: SimulatedSequence, asked: ClientRequest) -> None:
        del replica.known[sequence]
        await self.policy.release(str(asked.id))
        self.measurements.finished(asked, self.now)
        self._on_end(asked)
        self._work -= 1
        self._push_work(self.now + asked.session.pause(), TURN, asked.session.number, asked.session)

    # Failures.

    async def _fail(self, replica: Replica) -> None:
        """End a replica: its cache is lost, and its requests start again elsewhere."""
        self.measurements.count("failures", self.now)
        step = replica.step
        if step is not None:
            self.measurements.busy(replica.busy_since, self.now)
            if step.run and (count := bisect_right(step.ends, self.now)):
                self.measurements.run([replica.known[each] for each in step.run], step.ends[:count])
        replica.is_alive, replica.step = False, None
        replica.version += 1
        self._alive.remove(replica.name)
        for asked in replica.known.values():
            await self.policy.release(str(asked.id))
            self.measurements.count("retried", self.now)
            self._push(self.now + self._cluster.retry_seconds, PLACE, asked.id, asked)
        replica.known.clear()
        self._changed.pop(replica.name, None)
        await self.policy.close(replica.name)
        self._push(self.now + self._cluster.start_seconds, RESTART, replica.number)

    async def _restart(self, replica: Replica) -> None:
        replica.new_events = []
        shape, times = self._recording.shape, self._recording.times
        replica.engine = SimulatedEngine(shape, times, self._listener(replica.new_events))
        replica.is_alive = True
        self._alive.append(replica.name)
        await self._open([replica])
        self._push(self.now + self._life(), FAILURE, replica.number)

    async def _sync(self) -> None:
        if self._changed:
            changed, self._changed = self._changed, {}
            await self.policy.sync(changed)
        self._push(self.now + self._cluster.sync_seconds, SYNC, 0)

    def _sample(self) -> None:
        alive = [each.engine for each in self._replicas if each.is_alive]
        waiting = [len(each.waiting) for each in alive]
        self.measurements.sample(
            self.now,
            {
                "alive": len(alive),
                "slots": len(alive) * self._recording.shape.slots,
                "running": sum(len(each.running) for each in alive),
                "waiting": sum(waiting),
            },
            max(waiting, default=0),
        )
        self._push(self.now + self._cluster.sample_seconds, SAMPLE, 0)
