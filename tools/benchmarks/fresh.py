"""Run Python code in a new process that prints JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def run(code: str, *arguments: str | Path) -> tuple[Any, float]:
    """Return the JSON value on the last line of output, and the seconds from process start to exit."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1]), seconds
