"""Random programs that write in place, through views and into state, and random schedules of them.

The generator keeps its own book of which tensor lies in which memory; what the room under test reads out of the graph
is never asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.bindings import Binding, Bindings, Role
from inlay.program.facts import Facts
from inlay.program.program import CallSpec, Program
from tests.streams.brute_force import Access, Truth

if TYPE_CHECKING:
    import random

    from tests.streams.brute_force import Events, Lanes

aten = torch.ops.aten
SIZE = 4
INPUTS = ("x", "state", "cache")


@dataclass(frozen=True)
class Value:
    """A tensor of a program: its node, the memory it lies in, and the task that hands it on, if there is one."""

    node: fx.Node
    memory: str
    task: str | None
    view: bool = False

    @property
    def made(self) -> str:
        return f"{self.node.name}, made"


@dataclass
class Writer:
    """A program as it is written, and what its author knows of it."""

    rng: random.Random
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: list[Value] = field(default_factory=list)
    accesses: dict[str, Access] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)

    def input(self, name: str) -> None:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.ones(SIZE, SIZE)
        self.values.append(Value(node, name, None))

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda each: each.meta["val"]))
        return node

    def pick(self) -> Value:
        """Any value; those made last are picked more often."""
        return self.values[-1 - min(int(self.rng.expovariate(0.5)), len(self.values) - 1)]

    def new(self) -> None:
        """A value in memory of its own."""
        taken = [self.pick() for _ in range(self.rng.choice((1, 2)))]
        target = aten.relu.default if len(taken) == 1 else aten.add.Tensor
        node = self.call(target, *(each.node for each in taken))
        self.homes[node.name] = node.name
        self.did(node, taken, node.name)
        self.values.append(Value(node, node.name, node.name))

    def view(self) -> None:
        """Another look at a value: no memory is touched, but whoever takes it needs it made."""
        base = self.pick()
        part = self.rng.random() < 0.5
        node = self.call(aten.slice.Tensor, base.node, 1, 0, SIZE) if part else self.call(aten.t.default, base.node)
        if base.task is not None:
            self.tell(base.task, base)
        needs = () if base.task is None else (base.made,)
        value = Value(node, base.memory, node.name, view=True)
        self.accesses[node.name] = Access(node.name, needs, (value.made,))
        self.values.append(value)

    def write(self) -> None:
        """A write into the memory of a value: given, computed, or a view of either."""
        target, other = self.pick(), self.pick()
        over = self.rng.random() < 0.5
        if target.memory == other.memory:
            taken = []
            node = self.call(aten.zero_.default, target.node) if over else self.call(aten.mul_.Scalar, target.node, 2)
        else:
            taken = [other]
            node = self.call(aten.copy_.default if over else aten.add_.Tensor, target.node, other.node)
        self.did(node, taken if over else [target, *taken], target.memory, target)
        self.values.append(Value(node, target.memory, node.name))

    def did(self, node: fx.Node, taken: list[Value], writes: str, over: Value | None = None) -> None:
        """A task read these values and wrote to that memory, through the view `over` if it is one."""
        needed = [each.made for each in (*taken, over) if each is not None and each.view]
        reads = dict.fromkeys([*(each.memory for each in taken), *needed])
        self.accesses[node.name] = Access(node.name, tuple(reads), (writes,))

    def tell(self, task: str, value: Value) -> None:
        """A task also makes it known that its tensor is there."""
        known = self.accesses[task]
        self.accesses[task] = Access(task, known.reads, tuple(dict.fromkeys((*known.writes, value.made))))

    def finish(self) -> tuple[Program, Truth]:
        returned = list({value.node: value for value in self.rng.sample(self.values, 1)}.values())
        self.graph.output(tuple(value.node for value in returned))
        homes = {
            memory: task for memory, task in self.homes.items() if memory not in {each.memory for each in returned}
        }
        shape = (SIZE, SIZE)
        ins = [Binding(name, Role.INPUT, name, "float32", shape) for name in INPUTS]
        outs = [Binding(f"out{place}", Role.OUTPUT, "", "float32", shape) for place, _ in enumerate(returned)]
        program = Program("generated", self.graph, Bindings((*ins, *outs)), {}, {}, CallSpec(None, None, ()), Facts())
        return program, Truth(tuple(self.accesses.values()), homes)


def random_program(rng: random.Random, tasks: int) -> tuple[Program, Truth]:
    """A program of so many operators, at least one of which writes in place."""
    writer = Writer(rng)
    for name in INPUTS:
        writer.input(name)
    weights = rng.choice(((5, 2, 3), (9, 0, 1)))
    for place in range(tasks):
        kind = rng.choices(("new", "view", "write"), weights)[0] if place else "write"
        getattr(writer, kind)()
    return writer.finish()


def random_right(rng: random.Random, truth: Truth, lanes: int) -> tuple[Lanes, Events]:
    """Lanes at random, in an order that keeps all that touch the same storage as they were; an event for every two
    tasks in different lanes that do, and a few that nobody needs."""
    left, order = list(truth.tasks), list[Access]()
    while left:
        ready = [each for place, each in enumerate(left) if not any(_meet(each, other) for other in left[:place])]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    where = {each.name: rng.randrange(lanes) for each in order}
    apart = [
        (one, two) for place, two in enumerate(order) for one in order[:place] if where[one.name] != where[two.name]
    ]
    events = [(one.name, two.name) for one, two in apart if _meet(one, two) or rng.random() < 0.1]
    return tuple(tuple(each.name for each in order if where[each.name] == lane) for lane in range(lanes)), tuple(events)


def random_any(rng: random.Random, truth: Truth, lanes: int) -> tuple[Lanes, Events]:
    """Lanes and events at random, right or not; they may wait for each other for ever."""
    names = [each.name for each in truth.tasks]
    if rng.random() < 0.3:
        rng.shuffle(names)
    where = {name: rng.randrange(lanes) for name in names}
    pairs = [
        (one, two) if rng.random() < 0.97 else (two, one) for place, two in enumerate(names) for one in names[:place]
    ]
    events = [pair for pair in pairs if where[pair[0]] != where[pair[1]] and rng.random() < 0.7]
    return tuple(tuple(name for name in names if where[name] == lane) for lane in range(lanes)), tuple(events)


def _meet(one: Access, two: Access) -> bool:
    return bool({*one.writes} & {*two.reads, *two.writes} or {*two.writes} & {*one.reads})
