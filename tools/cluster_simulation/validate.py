"""Compares a simulation with two real servers on this machine that get the same workload.

The client is one asyncio process. It chooses servers with the same `Selector`, sends token ids to `/v1/completions`
and streams the answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console
from rich.table import Table

from inlay.cluster.selector import EngineAddress, Selector
from inlay.runtime.request import Request
from tools.cluster_simulation.measurements import ClientRequest, Measurements
from tools.cluster_simulation.policies import POLICIES, Policy, new_policy
from tools.cluster_simulation.simulation import ClusterShape, Simulation
from tools.cluster_simulation.step_times import Recording

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from inlay.runtime.kv.events import CacheEvent
    from tools.cluster_simulation.workload import Session, Workload

COMPARED = ("busy_seconds", "cached_tokens", "ttft_mean", "ttft_p50", "ttft_p90", "itl_mean", "itl_p50", "itl_p90")
"""What the load and the speed of the servers decide. Requests, their tokens and the end of the run are decided by the
workload."""
ALLOWED = 0.15
_SECONDS = 120.0
"""Time limit of a request."""


@contextmanager
def _server(package: Path, block_size: int, options: Sequence[str]) -> Iterator[tuple[str, EngineAddress]]:
    """Run a server with one thread; yield its address, and how the selector knows it."""
    events, replay = (f"tcp://127.0.0.1:{_free_port()}" for _ in range(2))
    start = [
        sys.executable,
        "-c",
        "from inlay.cli.main import main; main()",
        "serve",
        str(package),
        "--speculation",
        "0",
        "--name",
        "model",
    ]
    process = subprocess.Popen(
        [*start, "--port", "0", "--kv-events", events, "--kv-replay", replay, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        if found is None:
            raise SystemExit("A server did not start.")
        yield found[0], EngineAddress(found[0], events, replay, block_size)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class RealSelection(Policy):
    """The selector with the KV events of real servers."""

    def __init__(self, workers: Sequence[EngineAddress]) -> None:
        super().__init__(0)
        self._selector, self._workers = Selector(), workers

    async def open(self, events: Mapping[str, Sequence[CacheEvent]]) -> None:
        """Subscribe to the servers."""
        await self._selector.update(self._workers, ())
        await asyncio.sleep(1)

    async def choose(self, key: str, request: Request, names: Sequence[str]) -> str:
        """Choose a server."""
        found = await self._selector.select(key, request.prompt, "", (), request.max_tokens)
        assert found is not None
        return found.worker

    async def start_decode(self, key: str) -> None:
        """A request has its first token."""
        await self._selector.start_decode(key)

    async def release(self, key: str) -> None:
        """A request ended."""
        await self._selector.release(key)

    def stop(self) -> None:
        """Stop the service."""
        self._selector.close()


class Client:
    """Runs a workload on servers."""

    def __init__(self, policy: Policy, urls: Sequence[str], workload: Workload) -> None:
        self._policy, self._urls, self._workload = policy, urls, workload
        self.measurements = Measurements(0.0, 10 * workload.seconds + 600)
        self.counts = {"requests": 0, "chunks": 0, "tokens": 0}
        self._http = httpx.AsyncClient(timeout=_SECONDS, limits=httpx.Limits(max_connections=256))
        self._start = time.perf_counter()

    @property
    def now(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._start

    async def run(self) -> None:
        """Run all sessions to their end."""
        await self._policy.open({url: [] for url in self._urls})
        self._start = time.perf_counter()
        tasks = []
        for at, session in self._workload.sessions():
            await asyncio.sleep(max(0.0, at - self.now))
            tasks.append(asyncio.create_task(self._talk(session)))
        await asyncio.gather(*tasks)
        await self._http.aclose()
        self._policy.stop()

    async def _talk(self, session: Session) -> None:
        while (turn := session.next_turn()) is not None:
            asked = ClientRequest(self.counts["requests"], session, *turn, self.now)
            self.counts["requests"] += 1
            asked.replica = await self._policy.choose(str(asked.id), asked.request, self._urls)
            await self.send(asked)
            await self._policy.release(str(asked.id))
            self.measurements.finished(asked, self.now)
            await asyncio.sleep(session.pause())

    async def send(self, asked: ClientRequest) -> None:
        """Send a request and read its tokens."""
        body = {"model": "model", "prompt": asked.request.prompt, "max_tokens": asked.request.max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", f"{asked.replica}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if line.startswith('data: {"error"'):
                    raise SystemExit(f"A server failed: {line}")
                if line.endswith('"usage":null}') or '"choices":[]' not in line:
                    await self._chunk(asked)
                else:
                    usage = json.loads(line[6:])["usage"]
                    asked.cached = usage["prompt_tokens_details"]["cached_tokens"]
                    self.counts["tokens"] += usage["completion_tokens"]
                    missing = usage["completion_tokens"] - asked.delivered  # tokens without text have no chunk
                    self.measurements.counts["tokens"] += missing
                    asked.delivered += missing
        if asked.delivered != asked.request.max_tokens:
            raise SystemExit(f"A server sent {asked.delivered} of {asked.request.max_tokens} tokens.")

    async def _chunk(self, asked: ClientRequest) -> None:
        self.counts["chunks"] += 1
        self.measurements.token(asked, self.now)
        if asked.delivered == 1:
            await self._policy.start_decode(str(asked.id))


async def idle_overhead(client: Client, recording: Recording, rounds: int = 12) -> float:
    """Return the median seconds that a request to an idle server takes beyond its recorded steps."""
    found = []
    session = next(client._workload.sessions())[1]
    for number in range(rounds):
        prompt = tuple(20000 + 400 * number + each for each in range(400))  # not in the vocabulary of the workload
        asked = ClientRequest(-1, session, Request(prompt, max_tokens=1, ignore_eos=True), [], client.now)
        asked.replica = client._urls[number % len(client._urls)]
        await client.send(asked)
        expected = recording.times.empty_step + recording.times.prefill(400, 0, 0)
        found.append(asked.first_token - asked.arrival - expected)
    return statistics.median(found[2:])


def _finish(measured: Measurements) -> dict[str, Any]:
    """Return the summary with the throughput until the last token."""
    summary = measured.summary()
    return summary | {
        "tokens_per_second": summary["tokens"] / measured.end,
        "busy_seconds": measured.counts["busy_seconds"],
    }


async def real(given: argparse.Namespace, workload: Workload, recording: Recording) -> tuple[dict[str, Any], float]:
    """Run the workload on real servers; return the summary and the overhead of a request to an idle server."""
    with ExitStack() as stack:
        block_size, options = recording.shape.block_size, given.server_options.split()
        servers = [stack.enter_context(_server(given.package, block_size, options)) for _ in range(given.replicas)]
        urls = [url for url, _ in servers]
        probe = Client(new_policy("random", 0, block_size, 0, time.monotonic), urls, workload)
        overhead = await idle_overhead(probe, recording)
        await probe._http.aclose()
        policy = (
            RealSelection([worker for _, worker in servers])
            if given.policy == "kv_aware"
            else new_policy(given.policy, workload.seed, block_size, 0, time.monotonic)
        )
        client = Client(policy, urls, workload)
        before = sum(map(_step_seconds, urls))
        await asyncio.wait_for(client.run(), 3 * workload.seconds + 300)
        busy = sum(map(_step_seconds, urls)) - before
        return _finish(client.measurements) | {"client": client.counts, "busy_seconds": busy}, overhead


def _step_seconds(url: str) -> float:
    """Return the seconds of all steps of a server."""
    found = re.search(
        r"^inlay_step_microseconds(?:_total)? ([\d.e+]+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE
    )
    assert found is not None
    return float(found[1]) / 1e6


def simulated(given: argparse.Namespace, workload: Workload, recording: Recording) -> dict[str, Any]:
    """Simulate the workload; return the summary."""
    cluster = ClusterShape(given.replicas, sync_seconds=0.01, must_complete_sessions=True)
    simulation = Simulation(
        recording,
        cluster,
        workload,
        lambda clock: new_policy(
            given.policy, workload.seed, recording.shape.block_size, given.replicas, clock, given.predicted_seconds
        ),
    )
    simulation.measurements = Measurements(0.0, 10 * workload.seconds + 600)
    started = time.perf_counter()
    found = _finish(asyncio.run(simulation.run()))
    if simulation.policy.counts["selections_failed"]:
        raise SystemExit("The selection service did not answer in time.")
    return found | {"real_seconds": time.perf_counter() - started}


def compare(measured: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, for each compared value, the measured one, the mean simulated one and their relative difference."""
    found = {}
    for name in COMPARED:
        values = [each[name] for each in runs]
        mean = statistics.fmean(values)
        error = mean / measured[name] - 1 if measured[name] else float(mean != 0)
        found[name] = {
            "measured": measured[name],
            "simulated": mean,
            "lowest": min(values),
            "highest": max(values),
            "difference": error,
            "within": abs(error) <= ALLOWED,
        }
    return found


def run(given: argparse.Namespace, workload: Workload) -> None:
    """Run the comparison and print it; exit with 1 if a value differs by more than `ALLOWED`."""
    recording = Recording.read(given.steps)
    watch = CpuWatch()
    measured, overhead = asyncio.run(real(given, workload, recording))
    others = watch.others()
    recording = replace(recording, times=replace(recording.times, request_seconds=max(0.0, overhead)))
    runs = [simulated(given, workload, recording) for _ in range(given.repeats)]
    found = compare(measured, runs)
    utilisation = measured["busy_seconds"] / (given.replicas * measured["makespan"])
    title = f"{given.policy}: {measured['requests']:.0f} requests, {utilisation:.0%} utilisation"
    Console(width=120).print(_table(title, found))
    about = {"cpu_of_others": others, "request_seconds": overhead, "policy": given.policy, "utilisation": utilisation}
    about |= {"real_seconds": statistics.fmean(each["real_seconds"] for each in runs)}
    print(json.dumps(about | measured["client"]))
    if given.json:
        given.json.write_text(json.dumps({"about": about, "compared": found, "measured": measured}, indent=1) + "\n")
    if not all(each["within"] for each in found.values()):
        raise SystemExit(1)


class CpuWatch:
    """Measures how much of the cores other processes used: with more than a few percent, do not trust a comparison."""

    def __init__(self) -> None:
        self._wall, self._all, self._own = time.monotonic(), self._busy(), self._mine()

    def others(self) -> float:
        """Return the share of all cores that processes used that are neither this one nor its ended children."""
        used = (self._busy() - self._all) - (self._mine() - self._own)
        return used / ((time.monotonic() - self._wall) * (os.cpu_count() or 1))

    @staticmethod
    def _busy() -> float:
        user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
        return (user + nice + system) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _mine() -> float:
        both = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in both)


def _table(title: str, found: dict[str, dict[str, Any]]) -> Table:
    made = Table("value", "measured", "simulated", "range", "difference", f"within {ALLOWED:.0%}", title=title)
    for name, each in found.items():
        spread = f"{each['lowest']:.4g} … {each['highest']:.4g}"
        row = (f"{each['measured']:.4g}", f"{each['simulated']:.4g}", spread, f"{each['difference']:+.1%}")
        made.add_row(name, *row, "yes" if each["within"] else "no")
    return made


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    options.description = __doc__
    options.add_argument("package", type=Path)
    options.add_argument("--steps", type=Path, required=True, help="a recording of this package")
    options.add_argument("--replicas", type=int, default=2)
    options.add_argument("--policy", choices=POLICIES, default="kv_aware")
    options.add_argument(
        "--repeats", type=int, default=5, help="simulations, because the service breaks ties at random"
    )
    options.add_argument("--predicted-seconds", type=float, default=1.0, help="as for run")
    options.add_argument("--server-options", default="", help="further options of `inlay serve`")
    options.add_argument("--json", type=Path)
    options.set_defaults(prefixes=12, pause=3.0, turns=[2, 5])
