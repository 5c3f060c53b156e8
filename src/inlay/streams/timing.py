"""Measured durations of operators and events, which plans are based on."""

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
    from collections.abc import Mapping

    from inlay.program.program import Program


def measure_calls(program: Program, inputs: Mapping[str, Any], rounds: int = 5) -> dict[str, float]:
    """Return the seconds of each operator of a program, run in program order. `inputs`: binding name → input or state.

    Times are medians of several rounds after a warm-up round. All results of an operator count as one operator. States
    are copied, so each round begins with the same state and a cache does not fill up.

    >>> from inlay.testing import program_of
    >>> program = program_of(lambda x: x.relu() + 1, [torch.ones(2)])
    >>> sorted(measure_calls(program, {"values_0": torch.ones(2)}))
    ['add', 'relu']
    """
    rows = {row.name: row for row in program.bindings.with_role(Role.INPUT)}
    for name in (*rows, *inputs):
        if name not in rows or name not in inputs:
            problem = f"{name} is missing, or is not an input of the program."
            raise UsageError(problem, suggest(name, rows if name in inputs else inputs))
    values = {name: ref.read() for name, ref in program.tensors.items() if name not in rows} | dict(inputs)
    written = {row.name for row in program.bindings.state}

    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        fresh = {name: value.clone() if name in written else value for name, value in values.items()}
        interpreter = _TimingInterpreter(program)
        interpreter.run(*(fresh[row.name] for row in program.bindings.ins))
        for name, time in interpreter.spent.items() if number else ():
            times.setdefault(name, []).append(time)
    return {name: median(each) for name, each in times.items()}


class _TimingInterpreter(fx.Interpreter):
    """Runs a graph and measures each call."""

    def __init__(self, program: Program) -> None:
        owner = program.graph.owning_module
        super().__init__(owner if owner is not None else torch.nn.Module(), graph=program.graph)
        self.owner: dict[fx.Node, str] = {}
        self.spent: dict[str, float] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return super().run(*args, enable_io_processing=False, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        self.owner[n] = self.owner[n.args[0]] if is_result_item(n) else n.name  # type: ignore[index]
        start = perf_counter()
        result = super().run_node(n)
        self.spent[self.owner[n]] = self.spent.get(self.owner[n], 0.0) + perf_counter() - start
        return result


def measure_event(rounds: int = 200) -> float:
    """Return the seconds from the signal of one thread until a waiting thread continues."""
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
