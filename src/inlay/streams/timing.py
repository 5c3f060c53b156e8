"""Times that plans are made from: measured, never guessed."""

from __future__ import annotations

import threading
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.errors import UsageError, suggest
from inlay.program.bindings import Role
from inlay.streams.access_sets import is_result_item

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inlay.program.program import Program


def measure_calls(program: Program, inputs: Mapping[str, Any], rounds: int = 5) -> dict[str, float]:
    """Seconds of each operator of a program, run one after the other with these inputs and states, by name of binding.

    The median of several rounds, after one that is not counted. An operator's several results count as part of it.
    States are copied: each round begins with what was given, and a cache does not fill up.

    >>> from inlay.testing import program_of
    >>> program = program_of(lambda x: x.relu() + 1, [torch.ones(2)])
    >>> sorted(measure_calls(program, {"values_0": torch.ones(2)}))
    ['add', 'relu']
    """
    rows = {row.name: row for row in program.bindings.with_role(Role.INPUT)}
    for name in (*rows, *inputs):
        if name not in rows or name not in inputs:
            raise UsageError(f"{name} is not given, or is no input.", suggest(name, rows if name in inputs else inputs))
    values = {name: ref.read() for name, ref in program.tensors.items() if name not in rows} | dict(inputs)
    written = {row.name for row in program.bindings.state}

    def run(note: Callable[[str, float], None]) -> None:
        fresh = {name: value.clone() if name in written else value for name, value in values.items()}
        _TimingInterpreter(program, note).run(*(fresh[row.name] for row in program.bindings.ins))

    return _medians(run, rounds)


def _medians(run: Callable[[Callable[[str, float], None]], Any], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    run(lambda name, time: None)
    for _ in range(rounds):
        run(lambda name, time: times.setdefault(name, []).append(time))
    return {name: median(each) for name, each in times.items()}


class _TimingInterpreter(fx.Interpreter):
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
        self.owner[n] = self.owner[n.args[0]] if is_result_item(n) else n.name  # type: ignore[index]
        start = perf_counter()
        result = super().run_node(n)
        self.spent[self.owner[n]] = self.spent.get(self.owner[n], 0.0) + perf_counter() - start
        return result


def measure_event(rounds: int = 200) -> float:
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
