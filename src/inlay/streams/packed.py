"""Lanes in a package: its pieces cut where branches part, a schedule of them saved in it, and run from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from inlay.compile.execute import Executable, Execution
from inlay.compile.native import chained
from inlay.compile.pack import add_texts, lower
from inlay.errors import UsageError
from inlay.streams.bound import bound_steps
from inlay.streams.execute import Overlapped
from inlay.streams.from_program import work_of_plan
from inlay.streams.measuring import measured_steps
from inlay.streams.planning import schedule
from inlay.streams.saved import dumped, loaded
from inlay.streams.schedules import Schedule  # noqa: TC001 - `loaded` reads the annotations
from inlay.streams.work import Work  # noqa: TC001 - `loaded` reads the annotations

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from inlay.compile.execute import Runs
    from inlay.compile.load import LoadedPackage
    from inlay.compile.manifest import Bucket, Manifest
    from inlay.compile.pack import Lowered
    from inlay.program.program import Program
    from inlay.streams.course import Runner

NAME = "lanes.json"


@dataclass(frozen=True)
class Laned:
    """Which lanes run the steps of a package, and what these steps touch: both are needed to check it."""

    work: Work
    schedule: Schedule

    def text(self) -> str:
        """Both as JSON; equal ones give equal text."""
        return dumped(asdict(self))

    @classmethod
    def parse(cls, text: str | bytes) -> Laned:
        """Both from their JSON."""
        return loaded(cls, text)


def cut(program: Program, pieces: Work) -> Lowered:
    """A program cut along the pieces of its work, for all sizes: what `inlay.compile.pack.pack` makes a package of.

    Pack it with one intra-op thread (`torch.set_num_threads(1)`): code that starts more does so in every lane.
    """
    return lower(program, cuts=[task.calls for task in pieces.tasks])


def plan_lanes(
    package: LoadedPackage, lowered: Lowered, given: Mapping[str, Any], *, lanes: int = 2, event_seconds: float
) -> Laned:
    """A schedule of the steps of a package, by what they take with these inputs and states. States are written to."""
    steps = measured_steps(_execution(package), given)
    work = work_of_plan(lowered.buckets[-1][2], steps)
    return Laned(work, schedule(work, lanes=lanes, event_seconds=event_seconds))


def save(path: Path, made: Laned) -> Manifest:
    """Put a schedule into a package, in the place of one that may be there."""
    return add_texts(path, {NAME: made.text()})


def saved(package: LoadedPackage) -> Laned | None:
    """The schedule that a package holds, if it does."""
    file = package.folder / NAME
    return Laned.parse(file.read_bytes()) if NAME in package.manifest.files else None


def in_lanes(package: LoadedPackage, lanes: Runner) -> Executable:
    """The package as its schedule says; it is called like the package, and shares its weights.

    Nothing else looks at a schedule: a package that is simply loaded runs its steps one after the other.
    """
    found = saved(package)
    if found is None:
        raise UsageError("The package has no schedule.", "Put one into it: inlay.streams.packed.save.")
    overlapped = Overlapped(bound_steps(_execution(package), found.work), found.schedule, lanes)
    buckets: list[tuple[Bucket, Runs]] = [*package.buckets[:-1], (package.buckets[-1][0], overlapped)]
    return Executable(package.bindings, buckets, package.initial)


def _execution(package: LoadedPackage) -> Execution:
    """The steps for all sizes, each by itself."""
    steps = [chained([step], step.outs)[0] for step in package.steps[-1]]
    return Execution(steps, package.manifest.buckets[-1].results)
