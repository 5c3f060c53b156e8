"""Schedule: which lane runs which task, in what order, and who waits for whom."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from inlay.streams.work_graph import dump_json, load_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.streams.work_graph import WorkGraph


@dataclass(frozen=True, slots=True)
class Event:
    """Recorded in the lane of `after` right after it; the lane of `before` waits for it right before it.

    This is an event of a device or of threads. What a KV cache tells a router is called an event too, and is another
    thing: docs/streams.md.
    """

    after: str
    before: str

    def key(self) -> tuple[str, str]:
        """What events are sorted by."""
        return self.after, self.before

    def __str__(self) -> str:
        return f"{self.after} -> {self.before}"


@dataclass(frozen=True)
class Schedule:
    """Lanes, events between them, and the storages whose memory needs care. Any schedule can be written down: it need
    not be right (`inlay.streams.check_schedule` says whether it is).

    **A lane** is a queue: a stream of a device, or a thread. It runs its tasks in order, one at a time.

    **Happens before.** One task happens before another when it stands before it in the same lane, when an event says
    so, or when that follows from several of these. Nothing else orders two tasks: not the order of the program, not the
    order in which a host launches them, not how long they take. All tasks happen after what the caller did before the
    run, and before what it does after it: each lane waits at the start, and is waited for at the end.

    **Memory.** Lanes take memory from pools of their own. A storage that the run makes belongs to the lane of the task
    that writes it first in the order of the program: its home. An intermediate storage is given back to its home when
    all tasks that touch it have been launched, which may be before they have run, and never in the middle of a task.
    From then on any task of the home lane may be given that memory, whatever it writes. Storages in `recorded_storages`
    are not given back before every lane has got past its uses of them (`torch.Tensor.record_stream`, in every lane that
    touches one but its home).

    Events and recorded storages are kept sorted, each once, so schedules that say the same are equal.

    >>> one = Schedule((("a", "b"), ("c",)), (Event("a", "c"),))
    >>> one == Schedule((("a", "b"), ("c",)), (Event("a", "c"), Event("a", "c")))
    True
    >>> print(one)
    lane 0: a b
    lane 1: [a] c
    """

    lanes: tuple[tuple[str, ...], ...]
    """For each lane its tasks in order."""
    events: tuple[Event, ...] = ()
    recorded_storages: tuple[str, ...] = ()
    """Storages to be recorded in the lanes that use them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(sorted(set(self.events), key=Event.key)))
        object.__setattr__(self, "recorded_storages", tuple(sorted(set(self.recorded_storages))))

    @cached_property
    def lane_of(self) -> Mapping[str, int]:
        """Task → the lane that runs it."""
        return {name: index for index, tasks in enumerate(self.lanes) for name in tasks}

    @cached_property
    def waits(self) -> Mapping[str, tuple[str, ...]]:
        """Task → the tasks whose events its lane waits for before it."""
        found: dict[str, list[str]] = {}
        for event in self.events:
            found.setdefault(event.before, []).append(event.after)
        return {name: tuple(each) for name, each in found.items()}

    @cached_property
    def recording_tasks(self) -> frozenset[str]:
        """Tasks after which an event is recorded; several lanes may wait for the same one."""
        return frozenset(event.after for event in self.events)

    def __str__(self) -> str:
        lines = []
        for index, tasks in enumerate(self.lanes):
            words = [f"[{', '.join(self.waits[name])}] {name}" if name in self.waits else name for name in tasks]
            lines.append(f"lane {index}: {' '.join(words)}".rstrip())
        if self.recorded_storages:
            lines.append(f"recorded: {', '.join(self.recorded_storages)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The schedule as JSON; equal schedules give equal text."""
        return dump_json(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Schedule:
        """A schedule from its JSON."""
        return load_json(cls, text)


def serial_schedule(work: WorkGraph) -> Schedule:
    """All tasks in one lane in the order of the program: what is run when nothing is to overlap."""
    return Schedule((tuple(task.name for task in work.tasks),))
