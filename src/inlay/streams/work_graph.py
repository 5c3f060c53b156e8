"""Work: what has to be done, in the order of the program, and which memory each part of it touches.

Nothing here says where or when a task runs: that is a Schedule. Work is enough to decide whether a schedule is right.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from inlay.errors import PackageError, ProgramError
from inlay.program.json_values import DECODE_ERRORS, from_json

if TYPE_CHECKING:
    from collections.abc import Mapping


class Lifetime(StrEnum):
    """How long the contents of a storage are needed."""

    INPUT = "given"
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
    lifetime: Lifetime = Lifetime.INTERMEDIATE
    values: tuple[str, ...] = ()
    """The values that lie in it: names of nodes of a program."""
    nbytes: int | None = None
    """Its size; None where it depends on symbols or is not known."""
    is_uncertain: bool = False
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
    is_fixed: bool = False
    """A collective or a captured region: it stays in lane 0, and in order with the other fixed tasks."""
    calls: tuple[str, ...] = ()
    """The nodes of a program that it runs, by name, in order."""

    def __str__(self) -> str:
        time = "not measured" if self.seconds is None else f"{self.seconds * 1e6:.1f} µs"
        fixed = ", fixed" if self.is_fixed else ""
        return f"{self.name} ({time}{fixed}): {_names(self.reads)} -> {_names(self.writes)}"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"


@dataclass(frozen=True)
class WorkGraph:
    """Tasks in the order of the program, and the storages they touch.

    To run the tasks one after the other in this order is what the program means. A schedule is right when no task can
    tell the difference: each finds in each storage what it would have found then, and so does the caller at the end.

    >>> tasks = Task("make", (), ("x",)), Task("use", ("x",), ("y",))
    >>> work = WorkGraph(tasks, (Storage("x"), Storage("y", Lifetime.RESULT)))
    >>> work["use"].reads, work.storage_by_name["y"].lifetime.value
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
    def task_index(self) -> Mapping[str, int]:
        """Task → its place in the order of the program."""
        return {task.name: index for index, task in enumerate(self.tasks)}

    @cached_property
    def storage_by_name(self) -> Mapping[str, Storage]:
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
        return self.tasks[self.task_index[name]]

    def __len__(self) -> int:
        return len(self.tasks)

    def __str__(self) -> str:
        return "\n".join(map(str, self.tasks))

    @property
    def seconds(self) -> float:
        """How long all tasks take one after the other; those not measured count nothing."""
        return sum(task.seconds or 0.0 for task in self.tasks)

    def to_json(self) -> str:
        """The work as JSON; equal work gives equal text."""
        return dump_json(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkGraph:
        """Work from its JSON."""
        return load_json(cls, text)


T = TypeVar("T")


def dump_json(value: dict[str, Any]) -> str:
    """JSON in which equal values look equal."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")


def load_json(kind: type[T], text: str | bytes) -> T:
    """A value of this type from its JSON; anything else is refused."""
    try:
        value: T = from_json(kind, json.loads(text))
    except DECODE_ERRORS as error:
        raise PackageError(f"This is not a {_WORDS.sub(' ', kind.__name__).lower()}.", "Make it again.") from error
    return value
