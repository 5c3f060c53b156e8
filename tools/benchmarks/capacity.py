"""Measure the constants of the capacity formula in docs/serving.md: `python -m tools.benchmarks.capacity PACKAGE`.

Decode steps are timed at several batch sizes and lengths, and prompts at several sizes. Then the formula is compared
with the throughput of many clients. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from tools.benchmarks.http_client import ClientResult, send_request
from tools.benchmarks.serving import serving

STEPS = 60
"""Number of timed steps per batch size and length."""
CHUNK = 64
"""Prompt tokens that are computed per step."""


def figures(port: int) -> dict[str, float]:
    """Return the metrics of the server."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as found:
        rows = re.findall(r"^inlay_(\w+)(?:_total)? ([\d.e+]+)$", found.read().decode(), re.MULTILINE)
    return {name.removesuffix("_total"): float(value) for name, value in rows}


def body(size: int, made: int, rng: random.Random) -> dict[str, Any]:
    """Return a request with a random prompt that is not cached."""
    prompt = [rng.randrange(100, 300) for _ in range(size)]
    return {"prompt": prompt, "max_tokens": made, "ignore_eos": True, "temperature": 0}


async def step_seconds(port: int, batch: int, size: int, rng: random.Random) -> tuple[float, float]:
    """Return the seconds of a step with `batch` sequences, and their mean length including `size` prompt tokens."""
    made = 10 * STEPS + 2 * batch * size // CHUNK  # the first sequences decode during the prefill of the others
    while (idle := figures(port))["decode_sequences"] or idle[
        "prefill_sequences"
    ]:  # wait for the requests of the previous case
        await asyncio.sleep(0.05)
    asked = [asyncio.create_task(send_request(port, body(size, made, rng))) for _ in range(batch)]
    while (first := figures(port))["decode_sequences"] < batch:
        await asyncio.sleep(0.05)
    start = time.perf_counter()
    await asyncio.sleep(0.2)
    while (last := figures(port))["steps"] - first["steps"] < STEPS:
        await asyncio.sleep(0.2)
    seconds = (time.perf_counter() - start) / (last["steps"] - first["steps"])
    assert last["decode_sequences"] == batch, "a sequence finished too early"
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    return seconds, size + (
        (first["generation_tokens"] + last["generation_tokens"]) / 2 - idle["generation_tokens"]
    ) / batch


def first_token(port: int, size: int, rounds: int, rng: random.Random) -> float:
    """Return the median seconds to the first token of a prompt."""
    told = [asyncio.run(send_request(port, body(size, 1, rng))) for _ in range(rounds)]
    return statistics.median(each.end_time - each.start_time for each in told)


async def busy(port: int, clients: int, size: int, made: int, seconds: float, rng: random.Random) -> float:
    """Return the requests per second of several clients, each with one request at a time."""
    until = time.perf_counter() + seconds

    async def client() -> list[ClientResult]:
        told = []
        while time.perf_counter() < until:
            told.append(await send_request(port, body(size, made, rng)))
        return told

    start = time.perf_counter()
    told = [each for client in await asyncio.gather(*(client() for _ in range(clients))) for each in client]
    return len(told) / (max(each.end_time for each in told) - start)


def main() -> None:
    """Measure, fit the formula, and compare it with measured throughput."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("package", type=Path)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=15)
    given, rng = options.parse_args(), random.Random(0)
    with serving(given.package, "--cache-memory", "0") as (port, pid, _):
        slots = int(figures(port)["slots"])
        asyncio.run(busy(port, 4, 16, 16, 1, rng))
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        cases = [(batch, size) for batch in (1, 4, slots // 2, slots) for size in (32, 1024)]
        timed = [
            (batch, *asyncio.run(step_seconds(port, batch, size, rng))) for batch, size in cases * int(given.rounds)
        ]
        seconds = np.array([each[1] for each in timed])
        rows = np.array([[1, batch, batch * held] for batch, _, held in timed])
        fit, *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(rows)), rcond=None)  # minimizes relative errors
        for at, (batch, size) in enumerate(cases):
            same = slice(at, None, len(cases))
            said = float(np.median(rows[same] @ fit))
            print(
                f"step({batch}, {size}+) = {np.median(seconds[same]) * 1e3:.1f} ms, by the formula {said * 1e3:.1f} ms"
            )
        token = (first_token(port, 1792, given.rounds, rng) - first_token(port, 256, given.rounds, rng)) / (1792 - 256)
        print(f"fixed {fit[0] * 1e3:.2f} ms, row {fit[1] * 1e3:.2f} ms, held {fit[2] * 1e6:.2f} µs, ", end="")
        print(f"token {token * 1e3:.3f} ms")
        print(
            f"memory {resident / 1e6:.0f} MB with {figures(port)['kv_memory_bytes'] / 1e6:.0f} MB for keys and values"
        )
        for size, made in ((32, 128), (512, 64), (1024, 128)):
            length = size + made / 2
            share = size * token + made * float(np.dot(fit, [1, slots, slots * length])) / slots
            got = asyncio.run(busy(port, 2 * slots, size, made, given.seconds, rng))
            print(f"{size} in, {made} out: {got:.2f} requests/s, by the formula {1 / share:.2f}")


if __name__ == "__main__":
    main()
