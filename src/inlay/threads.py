"""OpenMP threads that wait for work spin. That is fast alone, and ruin where other processes want the cores.

While this process has to wait for cores, its threads spin for microseconds only, otherwise as OpenMP does by default.
libgomp has that switch inside: with more threads than cores it spins briefly (`gomp_throttled_spin_count_var`). So
while cores are short there is a second pool of threads, which sleeps. Tested with torch 2.13's libgomp.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_EVERY = 0.25
"""Seconds between two looks."""
_SHORT, _ENOUGH = 0.25, 0.08
"""Cores that this process waits for: from how many on they are short, and below how many they are not any more."""
_CALM = 4
"""So many looks in a row must find enough of them."""


def share_cores() -> None:
    """Watch from now on whether cores are short. Does nothing where the user has said how threads wait."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() and Path("/proc/self/schedstat").exists():
        threading.Thread(target=_watch, args=(_missing_cores(),), name="inlay-share-cores", daemon=True).start()


def _missing_cores() -> Iterator[float]:
    """For how many cores this process has waited of late, again and again."""
    never = threading.Event()  # a clock that does not hold up the end of the process
    before = _waited()
    while not never.wait(_EVERY):
        now = _waited()
        yield (now - before) / _EVERY
        before = now


def _waited() -> float:
    """Seconds that threads of this process were ready to run and had no core."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended
            total += int(file.read_text().split()[1])
    return total / 1e9


def _watch(looks: Iterable[float]) -> None:
    briefly: BriefSpins | None = None
    calm = 0
    for missing in looks:
        calm = calm + 1 if missing < _ENOUGH else 0
        if briefly is None and missing > _SHORT:
            briefly = BriefSpins.begin()
        elif briefly is not None and calm >= _CALM:
            briefly.end()
            briefly = None


class BriefSpins:
    """A pool of OpenMP threads that makes libgomp count more threads than cores, for as long as it lives."""

    def __init__(self, libgomp: ctypes.CDLL) -> None:
        self._libgomp, self._over = libgomp, threading.Event()
        self._owner = threading.Thread(target=self._own, name="inlay-brief-spins", daemon=True)
        self._owner.start()

    @classmethod
    def begin(cls) -> BriefSpins | None:
        """From now on; None where no libgomp is loaded."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        loaded = {line.split(maxsplit=5)[5] for line in maps if "/libgomp" in line}
        return cls(ctypes.CDLL(loaded.pop())) if len(loaded) == 1 else None

    def end(self) -> None:
        """Threads spin as before. The pool ends with the thread that owns it."""
        self._over.set()
        self._owner.join()

    def _own(self) -> None:
        nothing = ctypes.cast(self._libgomp.omp_get_thread_num, ctypes.c_void_p)
        cores = len(os.sched_getaffinity(0))
        self._libgomp.GOMP_parallel(nothing, None, ctypes.c_uint(cores), ctypes.c_uint(0))
        self._over.wait()
