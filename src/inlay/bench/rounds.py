"""Runs a benchmark in rounds: each contestant in turn runs every task once. Ratios are computed within a round."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inlay.bench.worker import UnavailableError, UnsupportedTaskError, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inlay.bench.worker import Contestant

FIRST = "first_token"
LONG_START = 30.0
"""Seconds. Contestants that take longer to start (because they compile) are started once, not every round."""


@dataclass(frozen=True)
class BenchTask:
    """A task to be timed: the request, and the number of tokens for each time in the answer."""

    name: str
    do: str
    request: dict[str, int]
    tokens: int = 1


@dataclass(frozen=True)
class Workload:
    """Sizes of the tasks; the same for all contestants."""

    tokens: int = 64
    context_tokens: int = 64
    long_context_tokens: int = 2048
    prompt: int = 512
    batch: int = 16

    def fit(self, max_seq_len: int, slots: int) -> tuple[Workload, list[str]]:
        """Return the workload reduced to the limits of a package, and notes about the reductions.

        >>> Workload().fit(96, 1)[0]
        Workload(tokens=24, context_tokens=64, long_context_tokens=72, prompt=96, batch=16)
        """
        tokens = min(self.tokens, max(1, (max_seq_len - min(self.context_tokens, max_seq_len // 2)) // 2))
        filled = min(self.context_tokens, max_seq_len - tokens)
        made = Workload(
            tokens,
            filled,
            min(self.long_context_tokens, max_seq_len - tokens),
            min(self.prompt, max_seq_len),
            self.batch,
        )
        notes = []
        if made != self:
            wanted = max(self.long_context_tokens + self.tokens, self.prompt)
            asked = f"a prompt of {made.prompt}, {made.tokens} decode tokens after {made.context_tokens}"
            asked += f", and after {made.long_context_tokens}"
            notes.append(
                f"Limited to {max_seq_len} tokens per sequence: {asked}. Build with --max-length {wanted} for more."
            )
        if slots < self.batch:
            notes.append(f"The package holds {slots} sequences, not {self.batch}. Build with --max-batch {self.batch}.")
        return made, notes

    def tasks(self, slots: int) -> list[BenchTask]:
        """Return the tasks of every contestant in each round."""
        decode = {"tokens": self.tokens, "context_tokens": self.context_tokens}
        found = [
            BenchTask("decode", "decode", decode),
            BenchTask(
                "deep_decode",
                "decode",
                {"tokens": max(1, self.tokens // 4), "context_tokens": self.long_context_tokens},
            ),
            BenchTask("prefill", "prefill", {"tokens": self.prompt}, self.prompt),
        ]
        if slots >= self.batch:
            request = {
                "sequences": self.batch,
                "tokens": max(1, self.tokens // 4),
                "context_tokens": self.context_tokens,
            }
            found.append(BenchTask(f"batch{self.batch}", "batch", request, self.batch))
        return found

    def limits(self, slots: int) -> list[BenchTask]:
        """Return the tasks of the package only: its linear layers alone, and reading as many bytes."""
        found = [BenchTask("bare_decode", "bare", {"rows": 1}), BenchTask("read", "read", {})]
        if slots >= self.batch:
            found.append(BenchTask(f"bare_batch{self.batch}", "bare", {"rows": self.batch}, self.batch))
        return found


@dataclass
class Samples:
    """The times of one contestant: task → rounds → seconds."""

    version: str
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, task: BenchTask, seconds: list[float]) -> None:
        """Add a round of a task."""
        self.seconds.setdefault(task.name, []).append(seconds)
        self.tokens[task.name] = task.tokens


@dataclass
class BenchResult:
    """All measurements, and notes about missing contestants and tasks."""

    samples: dict[str, Samples] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run_rounds(
    entries: Sequence[tuple[Contestant, Sequence[BenchTask]]], rounds: int, on_step: Callable[[str], None]
) -> BenchResult:
    """Start all contestants and run them in turn. Those that are unavailable or fail are noted and left out."""
    raced = BenchResult()
    with ExitStack() as stack:
        present = []
        for contestant, tasks in entries:
            on_step(f"starting {contestant.name}")
            try:
                worker = Worker(contestant)
            except UnavailableError as why:
                raced.notes.append(str(why))
                continue
            stack.callback(worker.close)
            present.append((worker, list(tasks)))
            raced.samples[contestant.name] = Samples(worker.version)
        for number in range(rounds):
            for worker, tasks in list(present):
                on_step(_turn_text(number, worker.contestant.name))
                try:
                    _run_round(worker, tasks, raced)
                except UnavailableError as why:
                    raced.notes.append(str(why))
                    present.remove((worker, tasks))
                    del raced.samples[worker.contestant.name]
    return raced


def steps(entries: Sequence[tuple[Contestant, Sequence[BenchTask]]], rounds: int) -> dict[str, float]:
    """Return the step names that `run_rounds` reports, with their approximate relative durations."""
    names = [contestant.name for contestant, _ in entries]
    turns = [_turn_text(number, name) for number in range(rounds) for name in names]
    return {f"starting {name}": 1.0 for name in names} | dict.fromkeys(turns, 2.0)


def _turn_text(number: int, name: str) -> str:
    return f"round {number + 1}: {name}"


def _run_round(worker: Worker, tasks: list[BenchTask], raced: BenchResult) -> None:
    samples = raced.samples[worker.contestant.name]
    _first_token(worker, samples)
    for task in list(tasks):
        try:
            if not samples.seconds.get(task.name):
                worker.call(task.do, **task.request)  # warm-up
            samples.add(task, worker.call(task.do, **task.request))
        except UnsupportedTaskError as why:
            tasks.remove(task)
            raced.notes.append(str(why))
    if not worker.wait_idle():
        raced.notes.append(f"{worker.contestant.name} uses the processor while it is idle.")


def _first_token(worker: Worker, samples: Samples) -> None:
    task = BenchTask(FIRST, FIRST, {})
    if worker.first_token_s > LONG_START:
        if FIRST not in samples.seconds:
            samples.add(task, [worker.first_token_s])
        return
    another = Worker(worker.contestant)
    samples.add(task, [another.first_token_s])
    another.close()


def assign_tasks(
    package: Contestant, others: Sequence[Contestant], workload: Workload, slots: int
) -> list[tuple[Contestant, list[BenchTask]]]:
    """Return each contestant with its tasks."""
    tasks: Any = workload.tasks(slots)
    return [(package, [*tasks, *workload.limits(slots)]), *((each, list(tasks)) for each in others)]
