"""Ground truth: run a schedule in every way it can be run, and look whether anybody can tell.

Nothing here knows of clocks or of pairs of tasks. Tasks are run one by one on storages that hold terms: what a task
sees and what it writes over. Memory is given away as the host launches, in every order in which it can launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True)
class Access:
    """What a task does, as its author knows it."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Truth:
    """Tasks in the order of the program; storages whose memory is given back; who allocates each."""

    tasks: tuple[Access, ...]
    homes: dict[str, str]
    """Intermediate storage with bytes → the task that makes it."""

    def users(self, storage: str) -> set[str]:
        return {task.name for task in self.tasks if storage in (*task.reads, *task.writes)}


Lanes = tuple[tuple[str, ...], ...]
Events = tuple[tuple[str, str], ...]


def all_orders(lanes: Lanes, events: Events) -> Iterator[tuple[str, ...]]:
    """Every order in which lanes that wait for each other can be run, or launched; none if they never end."""
    waits: dict[str, set[str]] = {}
    for after, before in events:
        waits.setdefault(before, set()).add(after)
    total = sum(map(len, lanes))

    def further(done: tuple[str, ...], heads: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
        if len(done) == total:
            yield done
        for lane, head in enumerate(heads):
            if head < len(lanes[lane]) and waits.get(lanes[lane][head], set()) <= set(done):
                ahead = (*heads[:lane], head + 1, *heads[lane + 1 :])
                yield from further((*done, lanes[lane][head]), ahead)

    return further((), (0,) * len(lanes))


def races(truth: Truth, lanes: Lanes, events: Events, recorded: Sequence[str] = ()) -> bool:
    """Whether some way to run the schedule is seen by some task, or by the caller at the end."""
    orders = list(all_orders(lanes, events))
    assert orders, "it never ends"
    taken = _given_away(truth, lanes, orders, set(recorded))
    terms: dict[Any, int] = {}
    expected = _told(truth, [task.name for task in truth.tasks], {}, terms)
    return any(_told(truth, order, taken, terms) != expected for order in orders)


def _given_away(
    truth: Truth, lanes: Lanes, launches: Sequence[Sequence[str]], recorded: set[str]
) -> dict[str, set[str]]:
    """Task → storages whose memory it may be given: in its lane, all users launched before it in some launch."""
    lane = {name: index for index, tasks in enumerate(lanes) for name in tasks}
    found: dict[str, set[str]] = {}
    for storage, maker in truth.homes.items():
        users = truth.users(storage)
        for launch in launches:
            left = set(users)
            for name in launch:
                if not left and lane[name] == lane[maker] and storage not in recorded:
                    found.setdefault(name, set()).add(storage)
                left.discard(name)
    return found


def _told(truth: Truth, order: Sequence[str], taken: dict[str, set[str]], terms: dict[Any, int]) -> dict[str, Any]:
    """What each task saw in what it reads and in what it writes over. Equal terms have equal numbers."""
    tasks = {task.name: task for task in truth.tasks}
    contents: dict[str, int] = {}
    told = {}
    for name in order:
        task = tasks[name]
        for storage in taken.get(name, ()):
            contents[storage] = terms.setdefault(("memory of", name), len(terms))
        seen = told[name] = tuple(contents.get(each, -1) for each in (*task.reads, *task.writes))
        for each in task.writes:
            contents[each] = terms.setdefault((name, each, seen), len(terms))
    return told
