"""Measure the first token of a prompt whose blocks are on disk, after `kill -9`, relative to a cold start.

    python -m tools.benchmarks.restart PACKAGE [--tokens 1000] [--rounds 5] [--folder DIR]

In each round, a server with an empty folder gets a random prompt, is killed when its blocks are written, and another
server gets the same prompt. Both times are those of the first request that a server gets, and of one token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import tempfile
import time
import urllib.request
from pathlib import Path

from inlay.bench.metrics import Spread, ratio
from tools.benchmarks.http_client import ClientResult, send_request
from tools.benchmarks.serving import serving


def main() -> None:
    """Print both times and their ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("package", type=Path)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the blocks are; by default the system's temporary folder")
    given = parser.parse_args()
    colds, restored = [], []
    for seed in range(given.rounds):
        prompt = random.Random(seed).choices(range(3, 256), k=given.tokens)
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            options = ("--disk-cache", f"{folder}/kv", "--disk-cache-size", "100GB")
            with serving(given.package, *options) as (port, pid, _):
                cold = _ask(port, prompt)
                while _figure(port, "disk_writes_total") < given.tokens // 32:
                    time.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
            with serving(given.package, *options) as (port, _, _):
                again = _ask(port, prompt)
        if again.text != cold.text or (cold.cached, again.cached) != (0, (given.tokens - 1) // 32 * 32):
            raise SystemExit(f"Not the same answer, or not from the disk: {cold}, {again}.")
        colds.append(cold.end_time - cold.start_time)
        restored.append(again.end_time - again.start_time)
    found = {"cold_s": Spread.of(colds), "restored_s": Spread.of(restored), "ratio": ratio(restored, colds)}
    print(json.dumps({name: each.to_json() for name, each in found.items() if each}, indent=2))


def _ask(port: int, prompt: list[int]) -> ClientResult:
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "temperature": 0}
    return asyncio.run(send_request(port, body))


def _figure(port: int, name: str) -> float:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    found = re.search(rf"^inlay_{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


if __name__ == "__main__":
    main()
