"""Times that plans are made from: measured, never guessed."""

from __future__ import annotations

import threading
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.errors import UsageError, nearest
from inlay.program.bindings import Role
from inlay.streams.touched import is_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inlay.compile.execute import Execution
    from inlay.program.program import Program


def measured_calls(program: Program, given: Mapping[str, Any], rounds: int = 5) -> dict[str, float]:
    """Seconds of each operator of a program, run one after the other with these inputs and states, by name of binding.

    The median of several rounds, after one that is not counted. An operator's several results count as part of it.
    States are copied: each round begins with what was given, and a cache does not fill up.

    >>> from inlay.testing import program_of
    >>> program = program_of(lambda x: x.relu() + 1, [torch.ones(2)])
    >>> sorted(measured_calls(program, {"values_0": torch.ones(2)}))
    ['add', 'relu']
    """
    rows = {row.name: row for row in program.bindings.of(Role.INPUT)}
    for name in (*rows, *given):
        if name not in rows or name not in given:
            raise UsageError(f"{name} is not given, or is no input.", nearest(name, rows if name in given else given))
    values = {name: ref.read() for name, ref in program.tensors.items() if name not in rows} | dict(given)
    written = {row.name for row in program.bindings.state}

    def run(note: Callable[[str, float], None]) -> None:
        fresh = {name: value.clone() if name in written else value for name, value in values.items()}
        _TimedCalls(program, note).run(*(fresh[row.name] for row in program.bindings.ins))

    return _medians(run, rounds)


def measured_steps(execution: Execution, given: Mapping[str, Any], rounds: int = 5) -> list[float]:
    """Seconds of each step of a plan that can be run, with these inputs and states; states are written to."""

    def run(note: Callable[[str, float], None]) -> None:
        values = dict(given)
        for place, (call, ins, outs, gone) in enumerate(execution.steps):
            taken = [values[name] for name in ins]
            start = perf_counter()
            made = call(taken)
            note(str(place), perf_counter() - start)
            values.update(zip(outs, made, strict=True))
            for name in gone:
                del values[name]

    with torch.no_grad():
        found = _medians(run, rounds)
    return [found[str(place)] for place in range(len(execution.steps))]


def _medians(run: Callable[[Callable[[str, float], None]], Any], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    run(lambda name, time: None)
    for _ in range(rounds):
        run(lambda name, time: times.setdefault(name, []).append(time))
    return {name: median(each) for name, each in times.items()}


class _TimedCalls(fx.Interpreter):
    """Runs a graph and notes what each call took."""

    def __init__(self, program: Program, note: Callable[[str, float], None]) -> None:
        owner = program.graph.owning_module
        super().__init__(owner if owner is not None else torch.nn.Module(), graph=program.graph)
        self.note = note
        self.owner: dict[fx.Node, str] = {}
        self.spent: dict[str, float] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            result = super().run(*args, enable_io_processing=False, **kwargs)
        for name, time in self.spent.items():
            self.note(name, time)
        return result

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        self.owner[n] = self.owner[n.args[0]] if is_part(n) else n.name  # type: ignore[index]
        start = perf_counter()
        result = super().run_node(n)
        self.spent[self.owner[n]] = self.spent.get(self.owner[n], 0.0) + perf_counter() - start
        return result


def measured_event(rounds: int = 200) -> float:
    """Seconds from when one thread says that it is done until another that waits for it goes on."""
    there, back = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(rounds):
            there.acquire()
            back.release()

    other = threading.Thread(target=answer)
    other.start()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        there.release()
        back.acquire()
        times.append((perf_counter() - start) / 2)
    other.join()
    return median(times)
