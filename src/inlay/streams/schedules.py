"""Schedule: which lane runs which task, in what order, and who waits for whom."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from inlay.streams.saved import dumped, loaded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.streams.work import Work


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
    not be right (`inlay.streams.check` says whether it is).

    **A lane** is a queue: a stream of a device, or a thread. It runs its tasks in order, one at a time.

    **Happens before.** One task happens before another when it stands before it in the same lane, when an event says
    so, or when that follows from several of these. Nothing else orders two tasks: not the order of the program, not the
    order in which a host launches them, not how long they take. All tasks happen after what the caller did before the
    run, and before what it does after it: each lane waits at the start, and is waited for at the end.

    **Memory.** Lanes take memory from pools of their own. A storage that the run makes belongs to the lane of the task
    that writes it first in the order of the program: its home. An intermediate storage is given back to its home when
    all tasks that touch it have been launched, which may be before they have run, and never in the middle of a task.
    From then on any task of the home lane may be given that memory, whatever it writes. Storages in `recorded` are not
    given back before every lane has got past its uses of them (`torch.Tensor.record_stream`, in every lane that touches
    one but its home).

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
    recorded: tuple[str, ...] = ()
    """Storages to be recorded in the lanes that use them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(sorted(set(self.events), key=Event.key)))
        object.__setattr__(self, "recorded", tuple(sorted(set(self.recorded))))

    @cached_property
    def lane(self) -> Mapping[str, int]:
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
    def records(self) -> frozenset[str]:
        """Tasks after which an event is recorded; several lanes may wait for the same one."""
        return frozenset(event.after for event in self.events)

    def __str__(self) -> str:
        lines = []
        for index, tasks in enumerate(self.lanes):
            words = [f"[{', '.join(self.waits[name])}] {name}" if name in self.waits else name for name in tasks]
            lines.append(f"lane {index}: {' '.join(words)}".rstrip())
        if self.recorded:
            lines.append(f"recorded: {', '.join(self.recorded)}")
        return "\n".join(lines)

    def text(self) -> str:
        """The schedule as JSON; equal schedules give equal text."""
        return dumped(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> Schedule:
        """A schedule from its JSON."""
        return loaded(cls, text)


def in_order(work: Work) -> Schedule:
    """All tasks in one lane in the order of the program: what is run when nothing is to overlap."""
    return Schedule((tuple(task.name for task in work.tasks),))


def differences(one: Schedule, two: Schedule) -> list[str]:
    """What the second schedule does otherwise, one sentence each; nothing when they are equal.

    >>> one = Schedule((("a", "b"), ("c",)), (Event("a", "c"),))
    >>> differences(one, Schedule((("a", "b", "c"),)))
    ['c moved from lane 1 to lane 0.', 'a -> c is gone.']
    """
    said = [
        f"{name} moved from lane {lane} to lane {two.lane[name]}."
        for name, lane in one.lane.items()
        if name in two.lane and two.lane[name] != lane
    ]
    said += [f"{name} is gone." for name in one.lane if name not in two.lane]
    said += [f"{name} is new, in lane {lane}." for name, lane in two.lane.items() if name not in one.lane]
    for index, (old, new) in enumerate(zip(one.lanes, two.lanes, strict=False)):
        both = set(old) & set(new)
        if [name for name in old if name in both] != [name for name in new if name in both]:
            said.append(f"Lane {index} has another order.")
    said += [f"{event} is gone." for event in one.events if event not in set(two.events)]
    said += [f"{event} is new." for event in two.events if event not in set(one.events)]
    said += [f"{name} is no longer recorded." for name in one.recorded if name not in set(two.recorded)]
    said += [f"{name} is recorded." for name in two.recorded if name not in set(one.recorded)]
    return said
