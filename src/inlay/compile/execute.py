"""Running a plan: steps in order, each value dropped after its last use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Run = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class BoundStep:
    """A piece with its weights bound, the values it takes and the values it makes."""

    run: Run
    ins: tuple[str, ...]
    outs: tuple[str, ...]


class Execution:
    """A plan that runs. It keeps nothing between calls: state is among what it is given."""

    def __init__(self, steps: Sequence[BoundStep], results: Sequence[str]) -> None:
        last: dict[str, int] = {}
        for index, step in enumerate(steps):
            last |= dict.fromkeys((*step.ins, *step.outs), index)
        gone: list[list[str]] = [[] for _ in steps]
        for name, index in last.items():
            if name not in results:
                gone[index].append(name)
        self.steps = [(step.run, step.ins, step.outs, tuple(names)) for step, names in zip(steps, gone, strict=True)]
        self.results = tuple(results)

    def __call__(self, given: Mapping[str, Any]) -> list[Any]:
        """All inputs and states by name → what the program returns, states left out."""
        values = dict(given)
        with torch.no_grad():
            for run, ins, outs, gone in self.steps:
                values.update(zip(outs, run([values[name] for name in ins]), strict=True))
                for name in gone:
                    del values[name]
        return [values[name] for name in self.results]
