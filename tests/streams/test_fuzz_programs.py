"""Programs of views, parts, copies and writes of all kinds, traced or not, run in any order that their lanes allow."""

from __future__ import annotations

import operator
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx

from inlay.program import Binding, Bindings, Facts, Program, Role
from inlay.program.program import CallSpec
from inlay.streams import build_work, check_schedule, group_tasks, merge_between_events, plan_schedule
from tests.streams.interleavings import any_order, calls_of, run_calls

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.fast
aten = torch.ops.aten
SIZE = 4
INPUTS = ("x", "state", "cache")


class Author:
    """Writes a program and runs it meanwhile, so that each call is one that can be made."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.graph = rng, fx.Graph()
        self.now: dict[fx.Node, Any] = {self.graph.placeholder(name): torch.ones(SIZE, SIZE) for name in INPUTS}
        self.values = list(self.now)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = target(*fx.map_arg(args, self.now.__getitem__), **fx.map_arg(kwargs, self.now.__getitem__))
        node = self.graph.call_function(target, args, kwargs)
        self.now[node] = made
        return node

    def pick(self) -> fx.Node:
        """A square value; those made last are picked more often."""
        square = [each for each in self.values if self.now[each].shape == (SIZE, SIZE)]
        return square[-1 - min(int(self.rng.expovariate(0.4)), len(square) - 1)]

    def shares(self, one: fx.Node, two: fx.Node) -> bool:
        first, second = (self.now[each].untyped_storage()._cdata for each in (one, two))
        return bool(first == second)

    def new(self) -> None:
        self.values.append(self.call(aten.add.Tensor, self.pick(), self.pick()))

    def look(self) -> None:
        base = self.pick()
        looks: list[Callable[[], fx.Node]] = [
            lambda: self.call(aten.t.default, base),
            lambda: self.call(aten.detach.default, base),
            lambda: self.call(aten.contiguous.default, base),
            lambda: self.call(aten.as_strided.default, base, [SIZE, SIZE], [1, SIZE], 0),
        ]
        self.values.append(self.rng.choice(looks)())

    def halves(self) -> None:
        parts = self.call(aten.split.Tensor, self.pick(), 2, self.rng.choice((0, 1)))
        self.values += [self.call(operator.getitem, parts, place) for place in (0, 1)]
        self.call(aten.mul_.Scalar, self.values[-self.rng.choice((1, 2))], 1.5)

    def reshaped(self) -> None:
        """A view, or a copy if the caller's tensor lies otherwise than the traced one did."""
        flat = self.call(aten.reshape.default, self.pick(), [SIZE * SIZE])
        self.values.append(self.call(aten.view.default, flat, [SIZE, SIZE]))
        if self.rng.random() < 0.5:
            self.call(aten.add_.Scalar, flat, 1)

    def row(self) -> None:
        parts = self.call(aten.unbind.int, self.pick(), self.rng.choice((0, 1)))
        row = self.call(operator.getitem, parts, 1)
        self.values.append(self.call(aten.expand.default, row, [SIZE, SIZE]))
        if self.rng.random() < 0.5:
            self.call(aten.neg_.default, row)

    def both(self) -> None:
        one, two = self.pick(), self.pick()
        if not self.shares(one, two):
            self.call(aten._foreach_add_.Scalar, [one, two], 1)

    def into(self) -> None:
        one, two, out = self.pick(), self.pick(), self.pick()
        if not self.shares(one, out) and not self.shares(two, out):
            self.values.append(self.call(aten.add.out, one, two, out=out))

    def over(self) -> None:
        one, two = self.pick(), self.pick()
        if not self.shares(one, two):
            self.values.append(self.call(aten.copy_.default, one, two))

    def best(self) -> None:
        self.values.append(self.call(operator.getitem, self.call(aten.topk.default, self.pick(), SIZE), 0))

    def program(self, calls: int, traced: bool) -> Program:
        kinds = (self.new, self.look, self.halves, self.reshaped, self.row, self.both, self.into, self.over, self.best)
        for _ in range(calls):
            try:
                self.rng.choice(kinds)()
            except RuntimeError:
                continue  # such a tensor cannot be written to, or looked at like this
        self.graph.output(tuple(self.rng.sample(self.values, 2)))
        if traced:
            for node, value in self.now.items():
                node.meta["val"] = value
        shape = (SIZE, SIZE)
        ins = [Binding(name, Role.INPUT, name, "float32", shape) for name in INPUTS]
        outs = [Binding(f"out{place}", Role.OUTPUT, "", "float32", shape) for place in range(2)]
        return Program("strange", self.graph, Bindings((*ins, *outs)), {}, {}, CallSpec(None, None, ()), Facts())


def _given(turned: bool) -> dict[str, torch.Tensor]:
    """Turned: not as they lay when the program was traced."""
    rows = [torch.arange(float(SIZE * SIZE)).view(SIZE, SIZE) + 10 * place for place in range(len(INPUTS))]
    return {name: row.t() if turned else row for name, row in zip(INPUTS, rows, strict=True)}


def _outcome(program: Program, turned: bool, calls: list[str]) -> list[torch.Tensor] | None:
    """What is returned and what the inputs are then; None where a call cannot be made of such tensors."""
    given = _given(turned)
    try:
        return [*run_calls(program, given, calls), *given.values()]
    except RuntimeError:
        return None


def test_any_order_of_lanes_gives_the_same() -> None:
    spread = ran = 0
    for seed in range(300):
        rng = random.Random(seed)
        program = Author(rng).program(14, traced=seed % 4 != 0)
        names = [task.name for task in build_work(program).tasks]
        work = build_work(program, {name: rng.uniform(1e-5, 1e-3) for name in names})
        work = group_tasks(work, 2e-4) if rng.random() < 0.5 else work
        made = plan_schedule(work, lanes=3, event_seconds=0.0)
        if rng.random() < 0.5:
            work, made = merge_between_events(work, made)
        assert check_schedule(work, made).ok
        spread += len(made.lanes) > 1
        turned = rng.random() < 0.5
        wanted = _outcome(program, turned, [node.name for node in program.graph.nodes if node.op == "call_function"])
        ran += wanted is not None
        for _ in range(3):
            found = _outcome(program, turned, calls_of(work, any_order(rng, made)))
            assert (found is None) == (wanted is None), f"seed {seed}"
            assert all(map(torch.equal, found or (), wanted or ())), f"seed {seed}"
    assert spread > 150
    assert ran > 200
