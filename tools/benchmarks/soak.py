"""Run a server under mixed load for a given time: `python -m tools.benchmarks.soak PACKAGE --seconds 3600`.

The load contains short and long prompts, shared and unique prompts, requests that are completed, aborted or read
slowly, and at times more requests than the server admits. The memory of the server is sampled continuously.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.benchmarks.http_client import percentile, send_request
from tools.benchmarks.serving import prompt, serving

FIRST = 0.2
"""Share of the run time after which memory should be stable."""


@dataclass
class Watched:
    """The observations of a run."""

    ends: Counter[str] = field(default_factory=Counter)
    firsts: list[float] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the start, and megabytes."""


async def client(port: int, number: int, stop: float, watched: Watched) -> None:
    """Send requests one after the other until the end of the run."""
    rng = random.Random(number)
    while time.monotonic() < stop:
        words = rng.choice([5, 20, 20, 100, 300])
        seed = rng.choice([1, 2, 3]) if rng.random() < 0.3 else rng.randrange(10**9)
        body = {"prompt": prompt(words, seed), "max_tokens": rng.choice([1, 16, 64, 128]), "seed": number}
        body |= rng.choice([{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"n": 2}, {"logprobs": 2}])
        asking = asyncio.create_task(send_request(port, body))
        if rng.random() < 0.1:
            await asyncio.wait([asking], timeout=rng.random())
            asking.cancel()
        done = (await asyncio.gather(asking, return_exceptions=True))[0]
        if isinstance(done, BaseException):
            watched.ends["gone" if isinstance(done, asyncio.CancelledError) else type(done).__name__] += 1
            continue
        watched.ends[str(done.status)] += 1
        if done.chunk_times:
            watched.firsts.append(done.time_to_first_token)
        if done.status == 429:
            await asyncio.sleep(rng.random())


async def slow_reader(port: int, stop: float) -> None:
    """Request many tokens and read none of them for a while."""
    while time.monotonic() < stop:
        body = {"model": "model", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        writer.write(f"{head}\r\n\r\n".encode() + data)
        await asyncio.sleep(20)
        writer.close()


def megabytes(process: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS"))


async def watch(process: int, stop: float, watched: Watched, begun: float) -> None:
    """Sample the memory every second."""
    while time.monotonic() < stop:
        watched.memory.append((time.monotonic() - begun, megabytes(process)))
        await asyncio.sleep(1)


async def soak(port: int, process: int, seconds: float, clients: int) -> Watched:
    """Run all clients and the memory sampling."""
    begun = time.monotonic()
    stop, watched = begun + seconds, Watched()
    await asyncio.gather(
        watch(process, stop, watched, begun),
        slow_reader(port, stop),
        *(client(port, number, stop, watched) for number in range(clients)),
    )
    return watched


def told(watched: Watched, seconds: float) -> dict[str, Any]:
    """Return the results, with memory after the first fifth of the time and at the end."""
    early = [size for when, size in watched.memory if seconds * FIRST <= when < seconds * (FIRST + 0.2)]
    late = [size for when, size in watched.memory if when >= seconds * 0.8]
    return {
        "seconds": seconds,
        "ends": dict(watched.ends),
        "first_token_p50_s": percentile(watched.firsts, 0.5),
        "first_token_p99_s": percentile(watched.firsts, 0.99),
        "early_mb": max(early),
        "late_mb": max(late),
        "growth": max(late) / max(early) - 1,
        "memory_mb": [round(size) for _, size in watched.memory[:: max(1, len(watched.memory) // 30)]],
    }


def main() -> None:
    """Run the load and print JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("package", type=Path)
    options.add_argument("--seconds", type=float, default=120)
    options.add_argument("--clients", type=int, default=24)
    given = options.parse_args()
    with serving(given.package, "--queue", "8") as (port, process, _):
        print(json.dumps(told(asyncio.run(soak(port, process, given.seconds, given.clients)), given.seconds), indent=1))


if __name__ == "__main__":
    main()
