"""What can be wrong with a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inlay.streams.schedule import Event


class ConflictKind(StrEnum):
    """Why two tasks must not change places; named after what the second one does."""

    RAW = "read after write"
    """The second reads what the first wrote."""
    WAR = "write after read"
    """The second writes over what the first reads."""
    WAW = "write after write"
    """Both write."""
    REUSE = "reuse"
    """The second may be given the memory of a storage that the first still uses."""


@dataclass(frozen=True)
class Race:
    """Two tasks, the first before the second in the order of the program, whose order matters and is not kept.

    For a reuse, `second` is the first task of the storage's home lane that may be given its memory: `first` uses the
    storage in another lane, and `second` does not touch it.
    """

    kind: ConflictKind
    first: str
    second: str
    storage: str
    missing_event: Event
    """The event that would put them in order."""
    is_reversed: bool = False
    """The schedule says that the second happens before the first: the event would close a circle of waits."""

    def __str__(self) -> str:
        if self.kind is ConflictKind.REUSE:
            return (
                f"{self.second} may be given the memory of {self.storage} while {self.first} uses it: "
                f"add the event {self.missing_event}, or record {self.storage}."
            )
        if self.is_reversed:
            return f"{self.kind.value} on {self.storage}: {self.second} runs before {self.first}. Put it after."
        return (
            f"{self.kind.value} on {self.storage}: {self.second} does not wait for {self.first}. "
            f"Add the event {self.missing_event}."
        )


class ScheduleErrorKind(StrEnum):
    """What makes a schedule none, or breaks a rule that has nothing to do with memory."""

    MISSING = "missing"
    """A task of the work is in no lane."""
    DUPLICATE = "twice"
    """A task is run more than once."""
    UNKNOWN = "unknown"
    """A lane, an event or the list of recorded storages names what the work does not have."""
    DEADLOCK = "deadlock"
    """Tasks wait for each other in a circle."""
    FIXED = "fixed"
    """A collective or a captured region is not in lane 0, or not in order with the others."""


@dataclass(frozen=True)
class ScheduleError:
    """A fault, the tasks it is about, and a sentence. The tasks of a deadlock are in the order of the circle."""

    kind: ScheduleErrorKind
    tasks: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class ScheduleCheck:
    """What a check found. Where a fault leaves no order to speak of, races were not looked for."""

    errors: tuple[ScheduleError, ...] = ()
    races: tuple[Race, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the schedule may be run."""
        return not self.errors and not self.races

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.errors, *self.races))) or "no race"
