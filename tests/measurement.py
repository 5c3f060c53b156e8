"""What work costs: counted in calls, whatever else the machine is doing, or by the clock."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program import Program


def seconds(work: Callable[[Program], object], program: Program) -> float:
    """By the clock."""
    start = time.perf_counter()
    work(program)
    return time.perf_counter() - start


class Calls:
    """Counts what Python calls, functions of its own and of C, while it is entered."""

    count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: object, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")


def calls(work: Callable[[Program], object], program: Program) -> int:
    """How many calls some work makes."""
    with Calls() as counted:
        work(program)
    return counted.count
