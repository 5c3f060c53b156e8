"""Rounds: in each, every contestant does every task once, one after the other. Ratios are taken within a round."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inlay.bench.worker import AbsentError, CannotError, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inlay.bench.worker import Contestant

FIRST = "first_token"
LONG_START = 30.0
"""Seconds: who takes longer to start (because it compiles) is started once, not every round."""


@dataclass(frozen=True)
class Task:
    """Something to be timed: what is asked, and how many tokens each of the times in the answer is for."""

    name: str
    do: str
    request: dict[str, int]
    tokens: int = 1


@dataclass(frozen=True)
class Workload:
    """How much is asked for; the same of everybody."""

    tokens: int = 64
    filled: int = 64
    deep: int = 2048
    prompt: int = 512
    batch: int = 16

    def within(self, room: int, slots: int) -> tuple[Workload, list[str]]:
        """What a package with so much room can do, and what had to be made smaller, in sentences.

        >>> Workload().within(96, 1)[0]
        Workload(tokens=24, filled=64, deep=72, prompt=96, batch=16)
        """
        tokens = min(self.tokens, max(1, (room - min(self.filled, room // 2)) // 2))
        filled = min(self.filled, room - tokens)
        made = Workload(tokens, filled, min(self.deep, room - tokens), min(self.prompt, room), self.batch)
        notes = []
        if made != self:
            wanted = max(self.deep + self.tokens, self.prompt)
            asked = f"a prompt of {made.prompt}, {made.tokens} tokens after {made.filled}, and after {made.deep}"
            notes.append(f"The package holds {room} tokens: {asked}. Build with --max-length {wanted} for more.")
        if slots < self.batch:
            notes.append(f"The package holds {slots} sequences, not {self.batch}. Build with --max-batch {self.batch}.")
        return made, notes

    def tasks(self, slots: int) -> list[Task]:
        """What every contestant is asked each round."""
        decode = {"tokens": self.tokens, "filled": self.filled}
        found = [
            Task("decode", "decode", decode),
            Task("deep_decode", "decode", {"tokens": max(1, self.tokens // 4), "filled": self.deep}),
            Task("prefill", "prefill", {"tokens": self.prompt}, self.prompt),
        ]
        if slots >= self.batch:
            request = {"sequences": self.batch, "tokens": max(1, self.tokens // 4), "filled": self.filled}
            found.append(Task(f"batch{self.batch}", "batch", request, self.batch))
        return found

    def limits(self, slots: int) -> list[Task]:
        """What only the package itself is asked: its linear layers alone, and reading as many bytes."""
        found = [Task("bare_decode", "bare", {"rows": 1}), Task("read", "read", {})]
        if slots >= self.batch:
            found.append(Task(f"bare_batch{self.batch}", "bare", {"rows": self.batch}, self.batch))
        return found


@dataclass
class Samples:
    """What one contestant took: task → rounds → seconds."""

    version: str
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, task: Task, seconds: list[float]) -> None:
        """Note a round of a task."""
        self.seconds.setdefault(task.name, []).append(seconds)
        self.tokens[task.name] = task.tokens


@dataclass
class Raced:
    """All that was measured, and who or what is missing, in sentences."""

    samples: dict[str, Samples] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def race(entries: Sequence[tuple[Contestant, Sequence[Task]]], rounds: int, on_step: Callable[[str], None]) -> Raced:
    """Start everybody, then let them take turns. Who cannot take part, or fails on the way, is noted and left out."""
    raced = Raced()
    with ExitStack() as stack:
        present = []
        for contestant, tasks in entries:
            on_step(f"starting {contestant.name}")
            try:
                worker = Worker(contestant)
            except AbsentError as why:
                raced.notes.append(str(why))
                continue
            stack.callback(worker.close)
            present.append((worker, list(tasks)))
            raced.samples[contestant.name] = Samples(worker.version)
        for number in range(rounds):
            for worker, tasks in list(present):
                on_step(_turn_text(number, worker.contestant.name))
                try:
                    _turn(worker, tasks, raced)
                except AbsentError as why:
                    raced.notes.append(str(why))
                    present.remove((worker, tasks))
                    del raced.samples[worker.contestant.name]
    return raced


def steps(entries: Sequence[tuple[Contestant, Sequence[Task]]], rounds: int) -> dict[str, float]:
    """What `race` says it does, and about how long each takes relative to the others."""
    names = [contestant.name for contestant, _ in entries]
    turns = [_turn_text(number, name) for number in range(rounds) for name in names]
    return {f"starting {name}": 1.0 for name in names} | dict.fromkeys(turns, 2.0)


def _turn_text(number: int, name: str) -> str:
    return f"round {number + 1}: {name}"


def _turn(worker: Worker, tasks: list[Task], raced: Raced) -> None:
    samples = raced.samples[worker.contestant.name]
    _first_token(worker, samples)
    for task in list(tasks):
        try:
            if not samples.seconds.get(task.name):
                worker.ask(task.do, **task.request)  # the first time is for warming up
            samples.add(task, worker.ask(task.do, **task.request))
        except CannotError as why:
            tasks.remove(task)
            raced.notes.append(str(why))
    if not worker.settle():
        raced.notes.append(f"{worker.contestant.name} goes on using the processor when it has nothing to do.")


def _first_token(worker: Worker, samples: Samples) -> None:
    task = Task(FIRST, FIRST, {})
    if worker.first_token_s > LONG_START:
        if FIRST not in samples.seconds:
            samples.add(task, [worker.first_token_s])
        return
    another = Worker(worker.contestant)
    samples.add(task, [another.first_token_s])
    another.close()


def entries_for(
    package: Contestant, others: Sequence[Contestant], workload: Workload, slots: int
) -> list[tuple[Contestant, list[Task]]]:
    """Who is asked what."""
    tasks: Any = workload.tasks(slots)
    return [(package, [*tasks, *workload.limits(slots)]), *((each, list(tasks)) for each in others)]
