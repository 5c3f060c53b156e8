"""Servers in processes of their own, for tests."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "tiny"
START = [sys.executable, "-c", "from inlay.cli.main import main; main()", "serve"]
SECONDS = 120.0
"""How long anything may take before a test gives up."""


class Server:
    """`inlay serve`, from its start to its end."""

    def __init__(self, package: Path, folder: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.log = folder / f"stderr-{time.monotonic_ns()}.jsonl"
        command = [*START, str(package), "--name", NAME, "--port", "0", *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **(env or {})}
            )
        self.welcome = self._first_line()
        found = re.search(r"http://\S+:(\d+)/v1", self.welcome)
        assert found, (self.welcome, self.log.read_text())
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _first_line(self) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            if not ready.select(SECONDS):
                self.process.kill()
        return self.process.stdout.readline()

    def terminate(self) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def memory(self) -> int:
        """Bytes it has in memory now."""
        with open(f"/proc/{self.process.pid}/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    def figures(self, key: str = "") -> dict[str, float]:
        """What it counts."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=SECONDS).raise_for_status().text
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("inlay_"): float(value) for name, value in rows}

    def wait_until(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Until the figures are so."""
        deadline = time.monotonic() + SECONDS
        while not holds(figures := self.figures()):
            assert time.monotonic() < deadline, {name: figures[name] for name in figures if "_bucket" not in name}
            time.sleep(0.02)
        return figures

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def prompt(count: int, **more: Any) -> dict[str, Any]:
    """A request for exactly so many tokens."""
    return {"model": NAME, "prompt": "The fox", "max_tokens": count, "ignore_eos": True, "temperature": 0, **more}


def stream(server: Server, count: int, **more: Any) -> Any:
    """An answer of so many tokens as it comes: a response to be used in a `with`."""
    body = prompt(count, stream=True, **more)
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=SECONDS)
