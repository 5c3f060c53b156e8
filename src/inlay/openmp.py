"""Shortens the spinning of idle OpenMP threads. Spinning is fast on a free machine, but blocks cores others need.

While this process waits for cores, its threads spin only for microseconds; otherwise OpenMP's default applies. libgomp
spins briefly if there are more threads than cores (`gomp_throttled_spin_count_var`). So a second pool of sleeping
threads exists while cores are short.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.machine import core_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_INTERVAL = 0.25
"""Seconds between two samples."""
_HIGH_WAIT_SHARE, _LOW_WAIT_SHARE = 1 / 8, 1 / 25
"""Share of all cores that this process waits for: above the first, cores are short; below the second, they suffice."""
_MIN_CALM_SAMPLES, _MAX_CALM_SAMPLES = 4, 16
"""Consecutive samples that must find enough cores. The number doubles after each shortage."""


@cache
def share_cores() -> None:
    """Start watching for a shortage of cores. Does nothing if the user has configured how threads wait."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() and Path("/proc/self/schedstat").exists():
        threading.Thread(target=_watch, args=(_sample_wait_share(),), name="inlay-share-cores", daemon=True).start()


def _sample_wait_share() -> Iterator[float]:
    """Yield, at every interval, the share of all cores that this process waited for."""
    never = threading.Event()  # a timer that does not delay the exit of the process
    before, since = _thread_wait_times(), time.monotonic()
    while not never.wait(_INTERVAL):
        waited, now = _thread_wait_times(), time.monotonic()
        more = sum(seconds - before.get(thread, 0.0) for thread, seconds in waited.items())
        yield more / (now - since) / core_count()
        before, since = waited, now


def _thread_wait_times() -> dict[str, float]:
    """Return the seconds that each thread of this process was runnable without a core."""
    seconds = {}
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError, IndexError), open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
            seconds[thread] = int(file.read().split()[1]) / 1e9  # fails if the thread has ended
    return seconds


def _watch(looks: Iterable[float]) -> None:
    briefly: SpinThrottle | None = None
    calm, enough = 0, _MIN_CALM_SAMPLES
    for missing in looks:
        calm = calm + 1 if missing < _LOW_WAIT_SHARE else 0
        if briefly is None and missing > _HIGH_WAIT_SHARE:
            briefly = SpinThrottle.start()
        elif briefly is not None and calm >= enough:
            briefly.stop()
            briefly, enough = None, min(2 * enough, _MAX_CALM_SAMPLES)


class SpinThrottle:
    """A pool of OpenMP threads: while it exists, libgomp counts more threads than cores."""

    def __init__(self, libgomp: Any, threads: int) -> None:
        self._stop_event = threading.Event()
        self._thread = threading.Thread(
            target=self._run_pool, args=(libgomp, threads), name="inlay-brief-spins", daemon=True
        )
        self._thread.start()

    @classmethod
    def start(cls) -> SpinThrottle | None:
        """Start the pool; return None if torch is not loaded or does not use libgomp."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return None
        try:
            maps = Path("/proc/self/maps").read_text().splitlines()
            files = {Path(line.split(maxsplit=5)[5]) for line in maps if "/libgomp" in line}
            (file,) = [file for file in files if file.parent == Path(torch.__file__).parent / "lib"] or files
            # Together with the threads of torch, more threads than cores.
            return cls(ctypes.CDLL(str(file)), max(2, core_count() - torch.get_num_threads() + 2))
        except (OSError, RuntimeError, AttributeError, ValueError):
            return None

    def stop(self) -> None:
        """End the pool with the thread that owns it; threads spin as before."""
        self._stop_event.set()
        self._thread.join()

    def _run_pool(self, libgomp: Any, threads: int) -> None:
        nothing = ctypes.cast(libgomp.omp_get_thread_num, ctypes.c_void_p)
        libgomp.GOMP_parallel(nothing, None, ctypes.c_uint(threads), ctypes.c_uint(0))
        self._stop_event.wait()
