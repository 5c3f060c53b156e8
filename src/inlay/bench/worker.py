"""The parent side of a contestant: a process that is started, receives requests, and sleeps in between."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.errors import InlayError

PROTOCOL = Path(__file__).with_name("protocol.py")
REPLY_TIMEOUT_SECONDS = 1800.0
"""Seconds without an answer after which a contestant has failed. Compilation takes minutes."""
IDLE_SECONDS = 0.05
"""A contestant that uses no processor time for this long is asleep."""


class UnavailableError(InlayError):
    """A contestant cannot run; the message is the reason."""


class UnsupportedTaskError(InlayError):
    """A contestant does not support a task."""


@dataclass(frozen=True)
class Contestant:
    """A contestant: its name, its script, and the interpreter that runs it."""

    name: str
    script: Path
    python: Path
    arguments: dict[str, Any] = field(default_factory=dict)


class Worker:
    """The process of a contestant. `first_token_s` is the time from its start to its first token."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        if not contestant.python.exists():
            raise UnavailableError(
                f"{contestant.python} does not exist.", "Install the peers as described in docs/benchmarks.md."
            )
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        command = [contestant.python, "-P", PROTOCOL, contestant.script, json.dumps(contestant.arguments)]
        threads = contestant.arguments.get("threads")
        start = time.perf_counter()
        self._process = subprocess.Popen(
            [str(each) for each in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        )
        answer = self._answer()
        self.first_token_s = time.perf_counter() - start
        if "absent" in answer:
            self.close()
            raise UnavailableError(f"{contestant.name} is unavailable: {answer['absent']}")
        self.version = str(answer["ready"])

    def call(self, do: str, **request: Any) -> list[float]:
        """Run a task; return the seconds of each token, step or pass."""
        try:
            self._stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self._exit_error() from error
        answer = self._answer()
        if "cannot" in answer:
            raise UnsupportedTaskError(f"{self.contestant.name}: {answer['cannot']}")
        if "failed" in answer:
            raise UnavailableError(f"{self.contestant.name} failed: {answer['failed']}")
        return [float(each) for each in answer["seconds"]]

    def wait_idle(self, timeout: float = 2.0) -> bool:
        """Wait until the process sleeps, as pool threads spin for a while; return whether it does."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            before = self._cpu_ticks()
            time.sleep(IDLE_SECONDS)
            if self._cpu_ticks() == before:
                return True
        return False

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _cpu_ticks(self) -> int:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0  # not on Linux, or the process has ended
        return int(fields[11]) + int(fields[12])

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    def _answer(self) -> dict[str, Any]:
        stdout: Any = self._process.stdout
        if not select.select([stdout], [], [], REPLY_TIMEOUT_SECONDS)[0]:
            self.close()
            raise UnavailableError(
                f"{self.contestant.name} did not answer for {REPLY_TIMEOUT_SECONDS / 60:.0f} minutes."
            )
        line = stdout.readline()
        if not line:
            raise self._exit_error()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _exit_error(self) -> UnavailableError:
        code = self._process.wait()
        self._stderr.seek(0)
        last = [line.strip() for line in self._stderr.read().splitlines() if line.strip()][-1:]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return UnavailableError(f"{self.contestant.name} {how}{': ' + last[0] if last else ''}.")
