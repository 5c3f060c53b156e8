"""Work: what has to be done, in the order of the program, and which memory each part of it touches.

Nothing here says where or when a task runs: that is a Schedule. Work is enough to decide whether a schedule is right.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from inlay.errors import ProgramError
from inlay.streams.saved import dumped, loaded

if TYPE_CHECKING:
    from collections.abc import Mapping


class Life(StrEnum):
    """How long the contents of a storage are needed."""

    GIVEN = "given"
    """The caller's, and only read: weights, inputs."""
    STATE = "state"
    """The caller's, and written: it is there before the run, and its contents after the run matter."""
    RESULT = "result"
    """Made by the run and handed to the caller: it outlives the run."""
    INTERMEDIATE = "intermediate"
    """Made and used up by the run: its memory is free for others after its last use."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory. All views of it and all values written into it in place are one storage.

    A number (a size) that one task computes and another takes is a storage of its own with no bytes.
    """

    name: str
    life: Life = Life.INTERMEDIATE
    values: tuple[str, ...] = ()
    """The values that lie in it: names of nodes of a program, or of values that the steps of a plan hand on."""
    bytes: int | None = None
    """Its size; None where it depends on symbols or is not known."""
    loose: bool = False
    """Some of its values may lie elsewhere after all, as only the run knows: it may be given back before they are used.
    """


@dataclass(frozen=True, slots=True)
class Task:
    """A unit of work that runs in one lane without a break.

    `reads` and `writes` name storages, not values. A storage that is updated in place is in `writes`, and in `reads`
    too if its old contents are used. A write need not fill the storage: what is there afterwards may depend on what
    was there before, so two writes to one storage never change places.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    seconds: float | None = None
    """Measured; None when nobody has measured it, and then it can be checked but not scheduled."""
    fixed: bool = False
    """A collective or a captured region: it stays in lane 0, and in order with the other fixed tasks."""
    calls: tuple[str, ...] = ()
    """The nodes of a program that it runs, by name, in order."""
    steps: tuple[int, ...] = ()
    """The steps of a plan that it runs, by their place in it, in order."""

    def __str__(self) -> str:
        time = "not measured" if self.seconds is None else f"{self.seconds * 1e6:.1f} µs"
        fixed = ", fixed" if self.fixed else ""
        return f"{self.name} ({time}{fixed}): {_names(self.reads)} -> {_names(self.writes)}"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"


@dataclass(frozen=True)
class Work:
    """Tasks in the order of the program, and the storages they touch.

    To run the tasks one after the other in this order is what the program means. A schedule is right when no task can
    tell the difference: each finds in each storage what it would have found then, and so does the caller at the end.

    >>> work = Work((Task("make", (), ("x",)), Task("use", ("x",), ("y",))), (Storage("x"), Storage("y", Life.RESULT)))
    >>> work["use"].reads, work.storage["y"].life.value
    (('x',), 'result')
    """

    tasks: tuple[Task, ...]
    storages: tuple[Storage, ...]

    def __post_init__(self) -> None:
        for what, rows in (("task", self.tasks), ("storage", self.storages)):
            counts = Counter(each.name for each in rows)
            if len(counts) != len(rows):
                raise ProgramError(f"The work has more than one {what} {counts.most_common(1)[0][0]}.")
        known = {each.name for each in self.storages}
        for task in self.tasks:
            for name in (*task.reads, *task.writes):
                if name not in known:
                    raise ProgramError(f"{task.name} touches {name}, which is no storage of the work.")

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Task → its place in the order of the program."""
        return {task.name: index for index, task in enumerate(self.tasks)}

    @cached_property
    def storage(self) -> Mapping[str, Storage]:
        """Storages by name."""
        return {each.name: each for each in self.storages}

    @cached_property
    def accesses(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each task the storages that it reads and those that it writes, by their places, each once."""
        place = {each.name: index for index, each in enumerate(self.storages)}
        return [
            (tuple({place[name]: None for name in task.reads}), tuple({place[name]: None for name in task.writes}))
            for task in self.tasks
        ]

    def __getitem__(self, name: str) -> Task:
        return self.tasks[self.place[name]]

    def __len__(self) -> int:
        return len(self.tasks)

    def __str__(self) -> str:
        return "\n".join(map(str, self.tasks))

    @property
    def seconds(self) -> float:
        """How long all tasks take one after the other; those not measured count nothing."""
        return sum(task.seconds or 0.0 for task in self.tasks)

    def text(self) -> str:
        """The work as JSON; equal work gives equal text."""
        return dumped(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> Work:
        """Work from its JSON."""
        return loaded(cls, text)
