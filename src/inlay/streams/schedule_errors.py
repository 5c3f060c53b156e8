"""Errors and races of schedules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inlay.streams.schedule import Event


class ConflictKind(StrEnum):
    """Why two tasks must stay in order; named after the access of the second task."""

    RAW = "read after write"
    """The second task reads what the first wrote."""
    WAR = "write after read"
    """The second task overwrites what the first reads."""
    WAW = "write after write"
    """Both tasks write."""
    REUSE = "reuse"
    """The second task may reuse the memory of a storage that the first still uses."""


@dataclass(frozen=True)
class Race:
    """Two tasks whose order matters and is not kept; `first` precedes `second` in program order.

    For a reuse, `first` uses the storage in another lane. `second` is the first task of the storage's home lane that
    may reuse its memory; it does not access the storage.
    """

    kind: ConflictKind
    first: str
    second: str
    storage: str
    missing_event: Event
    """The event that would order them."""
    is_reversed: bool = False
    """Whether the second task happens before the first, so that the event would create a deadlock."""

    def __str__(self) -> str:
        if self.kind is ConflictKind.REUSE:
            return (
                f"{self.second} may reuse the memory of {self.storage} while {self.first} uses it. "
                f"Add the event {self.missing_event}, or record {self.storage}."
            )
        if self.is_reversed:
            return f"{self.kind.value} on {self.storage}: {self.second} runs before {self.first}. Put it after."
        return (
            f"{self.kind.value} on {self.storage}: {self.second} does not wait for {self.first}. "
            f"Add the event {self.missing_event}."
        )


class ScheduleErrorKind(StrEnum):
    """Structural errors of a schedule, independent of memory."""

    MISSING = "missing"
    """A task of the work is not in any lane."""
    DUPLICATE = "twice"
    """A task is run more than once."""
    UNKNOWN = "unknown"
    """A lane, an event or a recorded storage has a name that is not in the work."""
    DEADLOCK = "deadlock"
    """Tasks wait for each other in a cycle."""
    FIXED = "fixed"
    """A collective or a captured region is not in lane 0, or not in program order with the other fixed tasks."""


@dataclass(frozen=True)
class ScheduleError:
    """An error, the tasks it concerns, and a message. The tasks of a deadlock are in the order of the cycle."""

    kind: ScheduleErrorKind
    tasks: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class ScheduleCheck:
    """The result of a check. Races are not searched if errors leave the order undefined."""

    errors: tuple[ScheduleError, ...] = ()
    races: tuple[Race, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the schedule is valid."""
        return not self.errors and not self.races

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.errors, *self.races))) or "no race"
