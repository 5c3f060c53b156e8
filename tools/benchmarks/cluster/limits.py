"""What the parts between replicas take: the selector with many workers, KV events, and CPU time of each process."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from inlay.cluster.selector import PREDICTED_SECONDS
from inlay.runtime.kv.events import EventLog, RemovedEvent, StoredEvent
from inlay.serve.kv_events.encoding import WireEncoder
from tools.benchmarks.http_client import percentile
from tools.cluster_simulation.event_feed import EventFeed, new_selector

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK = 32
"""Tokens of a block."""
_TICKS = os.sysconf("SC_CLK_TCK")


def _blocks(rng: random.Random, count: int, first: int) -> list[StoredEvent]:
    """Return a chain of random blocks."""
    made: list[StoredEvent] = []
    for number in range(first, first + count):
        parent = made[-1].hash if made else None
        made.append(StoredEvent(parent, number, tuple(rng.choices(range(1000, 20000), k=BLOCK)), "", 0, 0))
    return made


def _selection(*given: int) -> dict[str, float]:
    return asyncio.run(selection(*given))


def event_bytes() -> dict[str, float]:
    """Return the bytes of a stored and a removed block in vLLM's format."""
    encoder, blocks = WireEncoder(BLOCK), _blocks(random.Random(0), 100, 1 << 60)
    stored = [made for each in blocks for made in encoder.encode([each])]
    removed = [made for each in blocks for made in encoder.encode([RemovedEvent(each.hash, 0)])]
    size = msgspec.msgpack.Encoder().encode
    return {"stored": len(size(stored)) / len(blocks), "removed": len(size(removed)) / len(blocks)}


async def selection(workers: int, blocks: int, tokens: int, rounds: int) -> dict[str, float]:
    """Return times, memory and file descriptors of a selector whose workers each have so many blocks."""
    rng = random.Random(workers)
    names = [f"replica-{number}" for number in range(workers)]
    caches = {name: _blocks(rng, blocks, 10 + 1_000_000 * number) for number, name in enumerate(names)}
    before = _memory(), len(os.listdir("/proc/self/fd"))
    selector = new_selector(time.monotonic, PREDICTED_SECONDS)
    feed = EventFeed(selector, BLOCK, 1_000_000)  # publishers in another process, which is not measured
    started = time.perf_counter()
    await feed.open({name: [] for name in names})
    opened, cpu = time.perf_counter(), time.process_time()
    await feed.sync(caches)
    applied, used = time.perf_counter() - opened, time.process_time() - cpu
    after = _memory(), len(os.listdir("/proc/self/fd"))
    seconds = []
    for number in range(rounds):
        held = [token for block in caches[rng.choice(names)] for token in block.tokens][: tokens // 2]
        prompt = [*held, *rng.choices(range(1000, 20000), k=tokens - len(held))]
        began = time.perf_counter()
        found = await selector.select(str(number), prompt, "", (), 50)
        seconds.append(time.perf_counter() - began)
        assert found is not None
        await selector.start_decode(str(number))
        await selector.release(str(number))
    feed.stop()
    selector.close()
    return {
        "workers": workers,
        "subscribe_seconds": opened - started,
        "events": workers * blocks,
        "events_per_second": workers * blocks / applied,
        "cpu_microseconds_per_event": used / (workers * blocks) * 1e6,
        "bytes_per_block": (after[0] - before[0]) / (workers * blocks),
        "descriptors_per_worker": (after[1] - before[1]) / workers,
        "select_p50_ms": percentile(seconds, 0.5) * 1e3,
        "select_p99_ms": percentile(seconds, 0.99) * 1e3,
        "select_mean_ms": statistics.fmean(seconds) * 1e3,
    }


def log_event_microseconds(count: int = 200_000) -> float:
    """Return the time in which an engine adds an event to its log."""
    log, event = EventLog(10_000), _blocks(random.Random(0), 1, 1)[0]
    started = time.perf_counter()
    for _ in range(count):
        log.add(event)
    return (time.perf_counter() - started) / count * 1e6


def _memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of the processes of a cluster, by what they are, process and start time."""
    found: dict[str, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if kind := _kind(line):
            found[f"{kind} {folder.name} {fields[19]}"] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


KINDS = {
    "ray::ProxyActor": "proxy",
    ":Ingress": "ingress",
    ":Engine": "engine",
    "ray::SelectorActor": "selector",
    "ray::ServeController": "controller",
    "raylet/raylet": "raylet",
    "gcs_server": "gcs",
    "ray::": "other",
    "/ray/": "other",
}


def _kind(line: str) -> str | None:
    return next((kind for part, kind in KINDS.items() if part in line), None)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what each kind of process used between two measurements."""
    if gone := {name for name in before.keys() - after.keys() if not name.startswith("other")}:
        raise RuntimeError(f"ended meanwhile: {', '.join(gone)}")
    found: defaultdict[str, float] = defaultdict(float)
    for name, value in after.items():
        found[name.split()[0]] += value - before.get(name, 0.0)
    return dict(found)


def measure(counts: tuple[int, ...] = (1, 10, 100, 1000)) -> dict[str, Any]:
    """Measure the selector and the event plane."""
    rows = []
    for count in counts:  # each in a process of its own, because memory is measured
        given = count, 200 if count > 100 else 1000, 1024, 200
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            rows.append(process.submit(_selection, *given).result())
    return {"event_bytes": event_bytes(), "log_event_microseconds": log_event_microseconds(), "selection": rows}
