"""Threads that wait: OpenMP's way while there are enough cores, briefly while others want them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inlay import openmp

if not Path("/proc/self/schedstat").exists():
    pytest.skip("the kernel does not say how long threads wait", allow_module_level=True)
WATCHED = "inlay-share-cores"
MAIN = f"""
import threading
from inlay.cli import main
main.app = lambda: print(any(each.name == "{WATCHED}" for each in threading.enumerate()))
main.main()
"""
WAITING = """
import time, torch
from inlay.openmp import SpinThrottle
torch.set_num_threads(2)
numbers = torch.zeros(1 << 16)
def cost() -> float:
    before = time.process_time()
    for _ in range(40):
        numbers + numbers
        time.sleep(0.02)
    return time.process_time() - before
cost()
alone = cost()
briefly = SpinThrottle.start()
short = cost()
briefly.stop()
print(alone, short, cost())
"""


@pytest.mark.parametrize(
    ("given", "watched"), [({}, True), ({"GOMP_SPINCOUNT": "7"}, False), ({"OMP_WAIT_POLICY": "active"}, False)]
)
def test_what_the_user_says_stays(given: dict[str, str], watched: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    ran = subprocess.run([sys.executable, "-c", MAIN], env=env | given, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(watched)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads that share one core never spin for long")
def test_brief_spins() -> None:
    """In time of the processor. If this fails, libgomp's switch is not what `inlay.openmp` says it is."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    ran = subprocess.run([sys.executable, "-c", WAITING], env=env, capture_output=True, text=True, check=True)
    before, briefly, after = map(float, ran.stdout.split())
    assert briefly < before / 2
    assert briefly < after / 2


class _Briefly:
    told: list[str]

    @classmethod
    def start(cls) -> _Briefly:
        cls.told.append("start")
        return cls()

    def stop(self) -> None:
        self.told.append("stop")


def test_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first look that finds cores missing, until several in a row find none."""
    monkeypatch.setattr(openmp, "SpinThrottle", _Briefly)
    looks = {(0.1, 0.12, 0.0): [], (0.5,): ["start"], (0.5, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.2): ["start"]}
    looks[0.5, 0.0, 0.0, 0.0, 0.0, 0.1, 1.0] = ["start", "stop", "start"]
    looks[0.5, *4 * [0.0], 0.5, *7 * [0.0]] = ["start", "stop", "start"]
    looks[0.5, *4 * [0.0], 0.5, *8 * [0.0]] = ["start", "stop", "start", "stop"]
    for given, expected in looks.items():
        _Briefly.told = []
        openmp._watch(given)
        assert _Briefly.told == expected


def test_missing_cores_are_counted() -> None:
    """Two busy processes on one core: each has waited for about half of the time."""
    busy = f"""
import os, time
from inlay import openmp
os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})
before, end = openmp._thread_wait_times(), time.monotonic() + 1.5
while time.monotonic() < end: pass
print(sum(seconds - before.get(thread, 0) for thread, seconds in openmp._thread_wait_times().items()))
"""
    both = [subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sum(float(each.communicate()[0]) for each in both) > 0.3


def test_watching_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr(openmp, "_watch", begun.append)
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.run)  # here and now
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    openmp.share_cores.cache_clear()
    openmp.share_cores()
    openmp.share_cores()
    openmp.share_cores.cache_clear()
    assert len(begun) == 1
