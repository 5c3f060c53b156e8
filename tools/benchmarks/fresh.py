"""Python code in a new process, and what it says of itself as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def run(code: str, *arguments: str | Path) -> tuple[Any, float]:
    """What the code printed on its last line, and the seconds from starting the process to its end."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1]), seconds
