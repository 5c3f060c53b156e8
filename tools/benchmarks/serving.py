"""Benchmark a package as a server: `python -m tools.benchmarks.serving PACKAGE [--against PEERS --model FILE.gguf]`.

Runs with one client and with many clients are interleaved. llama.cpp decodes the same number of sequences with its
batch API, without HTTP and sampling. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.bench.worker import Contestant, Worker
from inlay.runtime.engine import Engine
from inlay.runtime.request import Request
from inlay.runtime.text_codec import TextCodec
from tools.benchmarks.http_client import ClientResult, percentile, send_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INLAY = str(Path(sys.executable).with_name("inlay"))
WORDS = Path(__file__).with_name("serving.py").read_text().split()


@contextlib.contextmanager
def serving(package: Path, *more: str, env: Mapping[str, str] | None = None) -> Iterator[tuple[int, int, float]]:
    """Start a server on a free port; yield its port, process id and start time."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [INLAY, "serve", str(package), "--name", "model", "--port", "0", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=None if env is None else dict(env),
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.search(r"127\.0\.0\.1:(\d+)", line)
            if found:
                break
        else:
            raise SystemExit(f"The server ended with exit code {process.wait()}.")
        # drain the pipe, so that it does not fill
        import threading

        threading.Thread(target=lambda: [None for _ in process.stdout or ()], daemon=True).start()
        yield int(found[1]), process.pid, started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def prompt(words: int, seed: int) -> str:
    """Return a random text of this many words."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def tokens(text: TextCodec, count: int, seed: int) -> list[int]:
    """Return a prompt of exactly `count` tokens."""
    return text.encode(prompt(count, seed))[:count]


async def together(port: int, clients: int, made: int, seed: int) -> tuple[float, list[ClientResult]]:
    """Return the total tokens per second of several clients, and their results."""
    bodies = [
        {"prompt": prompt(20, seed * 100 + number), "max_tokens": made, "ignore_eos": True, "temperature": 0}
        for number in range(clients)
    ]
    start = time.perf_counter()
    told = await asyncio.gather(*(send_request(port, body) for body in bodies))
    return sum(each.tokens for each in told) / (time.perf_counter() - start), list(told)


async def interrupted(port: int, text: TextCodec, clients: int, seconds: float) -> list[ClientResult]:
    """Run streaming clients while a new long prompt arrives every second; return the results of the clients."""
    stop = time.perf_counter() + seconds

    async def talk(number: int) -> list[ClientResult]:
        told: list[ClientResult] = []
        while time.perf_counter() < stop:
            body = {
                "prompt": prompt(20, number + len(told) * 100),
                "max_tokens": 256,
                "ignore_eos": True,
                "temperature": 0,
            }
            told.append(await send_request(port, body))
        return told

    async def interrupt() -> None:
        waiting = []
        for number in range(int(seconds)):
            body = {"prompt": tokens(text, 2000, 5000 + number), "max_tokens": 1, "temperature": 0}
            waiting.append(asyncio.create_task(send_request(port, body)))
            await asyncio.sleep(1)
        await asyncio.gather(*waiting)

    talked, _ = await asyncio.gather(asyncio.gather(*map(talk, range(clients))), interrupt())
    return [each for told in talked for each in told]


async def prefix(port: int, text: TextCodec, seed: int) -> tuple[ClientResult, ClientResult]:
    """Send the same prompt of 1,000 tokens twice."""
    body = {"prompt": tokens(text, 1000, 9000 + seed), "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    return await send_request(port, body), await send_request(port, body)


def spread(values: list[float]) -> dict[str, float]:
    """Return median, lowest and highest value."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def peer(against: Path, model: Path, threads: int) -> Worker:
    """Return llama.cpp as the worker that `inlay bench` uses."""
    script = Path(__file__).parent / "contestants" / "peers" / "llama_cpp.py"
    arguments = {"model": str(model.resolve()), "threads": threads}
    return Worker(Contestant("llama_cpp", script.resolve(), against.absolute() / "bin" / "python", arguments))


def throughput(port: int, others: Worker | None, rounds: int, clients: int, made: int) -> dict[str, Any]:
    """Measure one client, many clients, and llama.cpp with as many sequences, in interleaved rounds."""
    found: dict[str, list[float]] = {
        "one": [],
        "many": [],
        "other_many": [],
        "many_over_one": [],
        "many_over_other": [],
    }
    for number in range(rounds):
        one, _ = asyncio.run(together(port, 1, made, 2 * number))
        many, _ = asyncio.run(together(port, clients, made, 2 * number + 1))
        found["one"].append(one)
        found["many"].append(many)
        found["many_over_one"].append(many / one)
        if others is not None:
            seconds = sum(others.call("batch", sequences=clients, tokens=made, context_tokens=30))
            found["other_many"].append(clients * made / seconds)
            found["many_over_other"].append(many * seconds / (clients * made))
            others.wait_idle()
    return {name: spread(values) for name, values in found.items() if values}


def starts(package: Path, rounds: int) -> dict[str, Any]:
    """Measure the time from process start to the first token, with `inlay serve` and one request, and `inlay run`."""
    found: dict[str, list[float]] = {"run": [], "serve": []}
    for _ in range(rounds):
        start = time.perf_counter()
        command = [INLAY, "run", str(package), "Hello", "--max-tokens", "1"]
        subprocess.run(command, capture_output=True, check=True)
        found["run"].append(time.perf_counter() - start)
        with serving(package) as (port, _, started):
            told = asyncio.run(
                send_request(port, {"prompt": "Hello", "max_tokens": 1, "ignore_eos": True, "temperature": 0})
            )
            found["serve"].append(told.end_time - started)
    ratios = [serve / run for serve, run in zip(found["serve"], found["run"], strict=True)]
    return {name: spread(values) for name, values in {**found, "serve_over_run": ratios}.items()}


def overhead(package: Path, clients: int, made: int) -> list[float]:
    """Return the overhead of an engine step relative to the call of the package, for several rounds."""
    engine = Engine.open(package)
    shares = []
    for seed in range(6):
        before = engine.counts()
        for number in range(clients):
            prompt_ = tuple(engine.text.encode(prompt(20, 100 * seed + number)))
            engine.submit(Request(prompt_, max_tokens=made, ignore_eos=True))
        while engine.step():
            pass
        after = engine.counts()
        step, call = (after[name] - before[name] for name in ("step_microseconds", "call_microseconds"))
        shares.append(step / call - 1)
    engine.close()
    return shares[1:]


def main() -> None:
    """Measure and print JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("package", type=Path)
    options.add_argument("--against", type=Path)
    options.add_argument("--model", type=Path)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--seconds", type=float, default=30)
    given = options.parse_args()
    text = TextCodec.load(next((given.package / "versions").iterdir()) / "tokenizer")
    made: dict[str, Any] = {}
    with serving(given.package) as (port, _, _):
        asyncio.run(together(port, given.clients, 16, 77))
        others = peer(given.against, given.model, os.cpu_count() or 1) if given.against else None
        made["throughput"] = throughput(port, others, given.rounds, given.clients, given.tokens)
        if others is not None:
            others.close()
        pairs = [asyncio.run(prefix(port, text, number)) for number in range(given.rounds)]
        made["prefix"] = {
            "first": spread([first.time_to_first_token for first, _ in pairs]),
            "second": spread([second.time_to_first_token for _, second in pairs]),
            "ratio": spread([second.time_to_first_token / first.time_to_first_token for first, second in pairs]),
            "same": sum(first.text == second.text for first, second in pairs),
            "cached": [second.cached for _, second in pairs],
        }
        gaps = [
            gap for told in asyncio.run(interrupted(port, text, 4, given.seconds)) for gap in told.inter_token_times
        ]
        made["between_tokens"] = {
            "p50": percentile(gaps, 0.5),
            "p99": percentile(gaps, 0.99),
            "most": max(gaps),
            "count": len(gaps),
        }
        made["between_tokens"]["p99_over_p50"] = made["between_tokens"]["p99"] / made["between_tokens"]["p50"]
    made["overhead"] = {count: spread(overhead(given.package, count, given.tokens)) for count in (1, given.clients)}
    made["starts"] = starts(given.package, given.rounds)
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
