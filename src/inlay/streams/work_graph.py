"""Work graphs: tasks in program order, and the storages that each reads and writes.

A Schedule defines where and when a task runs. The work graph is sufficient to check whether a schedule is correct.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Self

from inlay.errors import PackageError, ProgramError, UsageError
from inlay.program.json_values import DECODE_ERRORS, from_json

if TYPE_CHECKING:
    from collections.abc import Mapping


_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class JsonRecord:
    """Data that is saved as JSON."""

    def to_json(self) -> str:
        """Return JSON in a canonical form: equal values give equal text."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return a value from its JSON; raise an error for anything else."""
        try:
            value: Self = from_json(cls, json.loads(text))
        except DECODE_ERRORS as error:
            problem = f"The JSON is not a valid {_WORDS.sub(' ', cls.__name__).lower()}."
            raise PackageError(problem, "Create it again.") from error
        return value


class Lifetime(StrEnum):
    """How long the contents of a storage are needed."""

    INPUT = "given"
    """Owned by the caller and only read: weights, inputs."""
    STATE = "state"
    """Owned by the caller and written. It exists before the run, and its contents after the run matter."""
    RESULT = "result"
    """Allocated by the run and returned to the caller. It outlives the run."""
    INTERMEDIATE = "intermediate"
    """Allocated and used within the run. Its memory may be reused after its last use."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory. All views of it and all values written into it in place are one storage.

    A number (a size) that one task computes and another uses is a separate storage of 0 bytes.
    """

    name: str
    lifetime: Lifetime = Lifetime.INTERMEDIATE
    values: tuple[str, ...] = ()
    """The values in it: names of nodes of a program."""
    nbytes: int | None = None
    """Its size; None if it depends on symbols or is unknown."""
    is_uncertain: bool = False
    """Some of its values may be in other memory at run time, so it may be freed before they are used."""


@dataclass(frozen=True, slots=True)
class Task:
    """A unit of work that runs in one lane without interruption.

    `reads` and `writes` name storages, not values. A storage that is updated in place is in `writes`, and also in
    `reads` if its old contents are used. A write may cover only a part of the storage, so two writes to one storage
    always stay in order.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    seconds: float | None = None
    """The measured duration; None if not measured. Then the task can be checked but not scheduled."""
    is_fixed: bool = False
    """A collective or a captured region: it stays in lane 0, in program order with the other fixed tasks."""
    calls: tuple[str, ...] = ()
    """Names of the program nodes that it runs, in order."""

    def __str__(self) -> str:
        time = "not measured" if self.seconds is None else f"{self.seconds * 1e6:.1f} µs"
        fixed = ", fixed" if self.is_fixed else ""
        return f"{self.name} ({time}{fixed}): {_names(self.reads)} -> {_names(self.writes)}"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"


@dataclass(frozen=True)
class WorkGraph(JsonRecord):
    """Tasks in program order, and the storages they access.

    Running the tasks one by one in this order defines the result. A schedule is correct if every task reads the same
    contents of each storage as in this order, and so does the caller at the end.

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
                    raise ProgramError(f"{task.name} accesses {name}, which is not a storage of the work.")

    @cached_property
    def task_index(self) -> Mapping[str, int]:
        """Task → its index in program order."""
        return {task.name: index for index, task in enumerate(self.tasks)}

    @cached_property
    def storage_by_name(self) -> Mapping[str, Storage]:
        """Storages by name."""
        return {each.name: each for each in self.storages}

    @cached_property
    def accesses(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each task the storages that it reads and those that it writes, by index, each once."""
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
        """Total duration of all tasks; tasks that are not measured count 0."""
        return sum(task.seconds or 0.0 for task in self.tasks)

    def require_times(self) -> None:
        """Raise an error if the duration of a task was not measured."""
        for task in self.tasks:
            if task.seconds is None:
                problem = f"The duration of {task.name} was not measured."
                raise UsageError(problem, "Measure it, or set it to 0 seconds.")
