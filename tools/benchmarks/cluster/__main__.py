"""Scenarios: prefixes, kill, update, scale, keys, choices, addresses, cost, cpu, limits, trace.

Each prints JSON. Run them on an idle machine, as root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.benchmarks.cluster.deployment import Deployment, deployment, isolate, selector_pid
from tools.benchmarks.cluster.limits import cpu_seconds, difference, measure
from tools.benchmarks.cluster.load import Outcome, now, run, shared_prefixes, summary
from tools.benchmarks.cluster.network import cut_off, lose_events
from tools.benchmarks.cluster.routers import ROUTERS, routed
from tools.benchmarks.http_client import percentile, send_request
from tools.benchmarks.serving import prompt, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    Disturbance = Callable[[Callable[[], int]], Awaitable[None]]


def prefixes(given: argparse.Namespace) -> Any:
    """64 clients, 20 shared prefixes of 800 tokens: each policy in turn, for several rounds, with empty caches."""
    rows = []
    for round_ in range(given.rounds):
        bodies = shared_prefixes(given.requests, 20, given.words, 8, round_ + 1)
        for policy in given.policies.split(","):
            with _cluster_or_router(policy, given) as (port, counters):
                start = now()
                outcomes = asyncio.run(run(port, bodies, given.clients))
                rows.append({"policy": policy, "round": round_, **summary(outcomes, now() - start)})
                print(json.dumps(rows[-1]), json.dumps(counters()), file=sys.stderr)
    return rows


@contextmanager
def _cluster_or_router(policy: str, given: argparse.Namespace) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yield the port of a new cluster, or of a router with as many servers; and a function that returns counters."""
    if policy in ROUTERS:
        options = ("--cache-memory", given.cache, "--queue", "64")  # none refuses, however they are chosen
        with routed(policy, given.package, given.replicas, *options) as port:
            yield port, dict
        return
    with deployment() as cluster:
        cluster.up(given.package, replicas=given.replicas, routing=policy, cache_memory=given.cache, queue=32)
        yield cluster.port, lambda: _router_counters(cluster)


def _router_counters(cluster: Deployment) -> dict[str, float]:
    wanted = (
        "placements_total",
        "placement_seconds_sum",
        "placement_seconds_count",
        "selector_failures",
        "attempts_failed",
        "predicted_tokens",
        "retries",
        "resumed",
    )
    return {name: value for name, value in cluster.metrics().items() if value and any(each in name for each in wanted)}


def _known_answers(package: Path, count: int, made: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return requests and their answers from a server without a cluster."""
    bodies = [
        {
            "prompt": prompt(30, number),
            "max_tokens": made,
            "ignore_eos": True,
            "temperature": number % 2 * 0.8,
            "seed": number,
        }
        for number in range(count)
    ]
    with serving(package, env={**os.environ, "OMP_NUM_THREADS": "1"}) as (port, _, _):
        answers = asyncio.run(run(port, bodies, 8))
    return bodies, {each.body["prompt"]: each.result.text for each in answers if each.end == "whole"}


def kill(given: argparse.Namespace) -> Any:
    """Streaming requests while something is killed or stopped every few seconds; every answer is compared."""
    known, answers = _known_answers(given.package, 50, given.tokens)
    with deployment() as cluster:
        shared = given.what in ("selector", "events")  # with one ingress, the selector is a part of it
        cluster.up(given.package, replicas=given.replicas, queue=32, ingress_replicas=1 + shared)
        bodies = [known[number % len(known)] for number in range(given.requests)]
        start = now()
        outcomes = asyncio.run(
            run(cluster.port, bodies, given.clients, lambda body: answers[body["prompt"]], _disturb(cluster, given))
        )
        return {
            "what": given.what,
            **summary(outcomes, now() - start),
            **_router_counters(cluster),
            "disturbances": DISTURBED,
        }


DISTURBED: list[str] = []


def _disturb(cluster: Deployment, given: argparse.Namespace) -> Disturbance:
    """Disturb the cluster every few seconds, without end."""

    async def disturb(done: Callable[[], int]) -> None:
        rng = random.Random(1)
        while True:
            await asyncio.sleep(given.every)
            DISTURBED.append(f"{done()} done: {await DISTURBANCES[given.what](cluster, given.every, rng)}")

    return disturb


async def _replica(cluster: Deployment, rng: random.Random) -> tuple[str, int]:
    """Return the name and the process of a running replica; wait until there is one."""
    while not (pids := await asyncio.to_thread(cluster.pids)):
        await asyncio.sleep(0.5)
    return rng.choice(sorted(pids.items()))


async def _kill_replica(cluster: Deployment, seconds: float, rng: random.Random) -> str:
    name, pid = await _replica(cluster, rng)
    os.kill(pid, signal.SIGKILL)
    return f"killed {name}"


async def _kill_selector(cluster: Deployment, seconds: float, rng: random.Random) -> str:
    try:
        os.kill(selector_pid(), signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return "there was no selector"
    return "killed the selector"


async def _stop_replica(cluster: Deployment, seconds: float, rng: random.Random) -> str:
    """A replica that is stopped keeps its connections and answers nothing, as one behind a network that is cut."""
    name, pid = await _replica(cluster, rng)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    with suppress(ProcessLookupError):  # it was replaced
        os.kill(pid, signal.SIGCONT)
    return f"stopped {name}"


async def _cut_off_replica(cluster: Deployment, seconds: float, rng: random.Random) -> str:
    """Drop the packets of a replica for a time, as behind a network that is partitioned."""
    name, pid = await _replica(cluster, rng)
    return f"cut off {name}, {await asyncio.to_thread(cut_off, pid, seconds)} ports"


async def _lose_events(cluster: Deployment, seconds: float, rng: random.Random) -> str:
    """Let the selector get no KV events for a time; those of this time are lost."""
    engines = set((await asyncio.to_thread(cluster.pids)).values())
    return f"lost the events of {await asyncio.to_thread(lose_events, selector_pid(), engines, seconds)} connections"


DISTURBANCES = {
    "replica": _kill_replica,
    "selector": _kill_selector,
    "stop": _stop_replica,
    "cut": _cut_off_replica,
    "events": _lose_events,
}


def update(given: argparse.Namespace) -> Any:
    """A rolling update during 500 requests, with the same config: the folder has another package.

    Every answer must be one of the two packages' own. Only prompts are sent whose two answers differ.
    """
    answers: dict[str, dict[str, str]] = {}
    for package in (given.other, given.package):
        bodies, answers[str(package)] = _known_answers(package, 50, given.tokens)
    old, new = answers[str(given.package)], answers[str(given.other)]
    bodies = [each for each in bodies if old[each["prompt"]] != new[each["prompt"]]]
    with deployment() as cluster:
        link = cluster.folder / "package"

        def deploy(package: Path) -> float:
            link.unlink(missing_ok=True)
            link.symlink_to(package.resolve())
            return cluster.up(link, replicas=given.replicas, queue=32)

        deploy(given.package)
        outcomes: list[Outcome] = []

        async def roll(done: Callable[[], int]) -> None:
            while done() < given.requests // 5:
                await asyncio.sleep(0.1)
            DISTURBED.append(f"{done()} done: update")
            seconds = await asyncio.to_thread(deploy, given.other)
            DISTURBED.append(f"{done()} done: updated after {seconds:.0f} s")
            await asyncio.Event().wait()

        start = now()
        wanted = [bodies[number % len(bodies)] for number in range(given.requests)]
        outcomes = asyncio.run(run(cluster.port, wanted, given.clients, meanwhile=roll))
        by = {str(package): 0 for package in (given.package, given.other)}
        for each in outcomes:
            of = [name for name, known in answers.items() if known[each.body["prompt"]] == each.result.text]
            if each.end == "whole":
                each.end = "exact" if of else "wrong"
            for name in of:
                by[name] += 1
        return {**summary(outcomes, now() - start), "answers_of": by, "disturbances": DISTURBED}


def scale(given: argparse.Namespace) -> Any:
    """Load that grows and ends: 1 → N → 1 replicas."""
    seen: list[tuple[float, int]] = []
    bounds = {"min": 1, "max": given.replicas, "queued_tokens": 512, "up_seconds": 2, "down_seconds": 15}
    with deployment() as cluster:
        cluster.up(given.package, replicas=bounds, queue=64)
        start = now()

        async def watch() -> None:
            while not seen or seen[-1][0] < given.seconds:
                count = len(await asyncio.to_thread(cluster.pids))
                if not seen or seen[-1][1] != count:
                    print(f"{now() - start:5.0f} s: {count} replicas", file=sys.stderr)
                seen.append((now() - start, count))
                most = max(count for _, count in seen)
                if most == given.replicas and count == 1:
                    return
                await asyncio.sleep(1)

        async def both() -> tuple[list[Outcome], list[Outcome]]:
            bodies = [
                {"prompt": prompt(250, number), "max_tokens": 32, "temperature": 0} for number in range(given.requests)
            ]
            watching = asyncio.ensure_future(watch())
            outcomes = await run(cluster.port, bodies, given.clients)
            trickle = [{"prompt": prompt(20, number), "max_tokens": 8, "temperature": 0} for number in range(10_000)]
            light: list[Outcome] = []
            while not watching.done():  # a light load stays, so that replicas are removed under requests
                light += await run(cluster.port, [trickle.pop() for _ in range(4)], 2)
            return outcomes, light

        outcomes, light = asyncio.run(both())
        return {
            **summary(outcomes, now() - start),
            "light_load": Counter(each.end for each in light),
            "most": max(count for _, count in seen),
            "last": seen[-1],
        }


def keys(given: argparse.Namespace) -> Any:
    """Two API keys send the same prompts: each hits only what it sent itself."""
    with deployment() as cluster:
        file = Path(cluster.folder, "keys.txt")
        file.write_text("first\nsecond\n")
        cluster.up(given.package, replicas=given.replicas, api_key_file=str(file), public_metrics=True, queue=32)
        rows = []
        for key in ("first", "second", "first", "second"):
            bodies = [
                {"prompt": prompt(given.words, each), "max_tokens": 4, "temperature": 0, "key": key}
                for each in range(12)
            ]
            outcomes = asyncio.run(run(cluster.port, bodies, 4))
            rows.append({"key": key, **summary(outcomes, 1)})
        return {"rows": rows, **_router_counters(cluster)}


def choices(given: argparse.Namespace) -> Any:
    """Requests with two prompts and three choices each: six calls of one HTTP request, all of which are answered."""
    with deployment() as cluster:
        cluster.up(given.package, replicas=given.replicas, queue=32)
        bodies = [
            {"prompt": [prompt(20, each), prompt(9, -each)], "n": 3, "max_tokens": 5, "ignore_eos": True}
            for each in range(given.requests)
        ]
        start = now()
        outcomes = asyncio.run(run(cluster.port, bodies, given.clients))
        tokens = sorted({each.result.tokens for each in outcomes})
        return {**summary(outcomes, now() - start), "tokens_of_a_request": tokens, **_router_counters(cluster)}


def addresses(given: argparse.Namespace) -> Any:
    """The addresses on which the processes of a cluster listen."""
    with deployment() as cluster:
        cluster.up(given.package, replicas=given.replicas)
        asyncio.run(run(cluster.port, [{"prompt": prompt(9, each), "max_tokens": 5} for each in range(8)], 2))
        told = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
        return Counter(line.split()[3].rpartition(":")[0] for line in told.splitlines())


def cost(given: argparse.Namespace) -> Any:
    """The first token of a short prompt, one client, one thread: from one server, and through each policy or router."""

    async def once(port: int, number: int) -> float:
        body = {"prompt": prompt(2, number), "max_tokens": 1, "temperature": 0}
        return (await send_request(port, body)).time_to_first_token * 1000

    def plain(port: int) -> float:
        start = now()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
            answer.read()
        return (now() - start) * 1000

    with ExitStack() as stack:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        ports = {"direct": stack.enter_context(serving(given.package, env=env))[0]}
        counters = {}
        if len(set(given.policies.split(",")) - set(ROUTERS)) > 1:
            raise SystemExit("cost compares one policy of a cluster with routers: a second cluster would be an update")
        for name in given.policies.split(","):
            ports[name], counters[name] = stack.enter_context(_cluster_or_router(name, given))
        times: dict[str, list[float]] = {name: [] for name in ports}
        models: dict[str, list[float]] = {name: [] for name in ports}
        for number in range(given.requests):
            for name, port in ports.items():
                times[name].append(asyncio.run(once(port, number)))
                models[name].append(plain(port))
        extra = {name: [a - b for a, b in zip(found, times["direct"], strict=True)] for name, found in times.items()}
        return {
            name: {
                "first_token_p50_ms": percentile(found[5:], 0.5),
                "over_direct_p50_ms": percentile(extra[name][5:], 0.5),
                "models_p50_ms": percentile(models[name][5:], 0.5),
                **({"counters": counters[name]()} if name in counters else {}),
            }
            for name, found in times.items()
        }


def cpu(given: argparse.Namespace) -> Any:
    """CPU milliseconds of each process for a request and for a token: two loads that differ in tokens only."""
    with deployment() as cluster:
        cluster.up(given.package, replicas=given.replicas, queue=64)
        asyncio.run(run(cluster.port, [{"prompt": prompt(2, each), "max_tokens": 8} for each in range(50)], 8))
        idle, _ = _used(asyncio.sleep(20))
        rows = {}
        for made in (1, given.tokens):
            bodies = [
                {"prompt": prompt(2, each), "max_tokens": made, "temperature": 0, "ignore_eos": True}
                for each in range(given.requests)
            ]
            start = now()
            used, outcomes = _used(run(cluster.port, bodies, given.clients))
            assert {each.end for each in outcomes} == {"whole"}, "a request failed"
            seconds = now() - start
            rows[made] = {name: value - idle[name] * seconds / 20 for name, value in used.items()}
        few, many = rows.values()
        token = {name: (many[name] - few[name]) / given.requests / (given.tokens - 1) for name in few}
        return {
            "ms_per_request": {name: (few[name] / given.requests - token[name]) * 1e3 for name in few},
            "ms_per_token": {name: each * 1e3 for name, each in token.items()},
            "idle_share_of_a_core": {name: each / 20 for name, each in idle.items()},
        }


def _used(work: Coroutine[Any, Any, Any]) -> tuple[dict[str, float], Any]:
    """Return the CPU seconds of each kind of process, and the result."""
    before = cpu_seconds()
    result = asyncio.run(work)
    return difference(before, cpu_seconds()), result


def limits(given: argparse.Namespace) -> Any:
    """The selector with 1 to 1,000 workers, and the event plane. The package is not used."""
    return measure()


def trace(given: argparse.Namespace) -> Any:
    """One traced request: its spans in all processes, from the files that Serve writes by default."""
    with deployment() as cluster:
        cluster.up(given.package, replicas=2, tracing=True)
        body = {"prompt": "The fox", "max_tokens": 4, "temperature": 0}
        done = asyncio.run(send_request(cluster.port, body))
        files = sorted(Path("/tmp/ray/session_latest/logs/serve/spans").iterdir())
        for _ in range(100):  # a span is written when it ends
            spans = [span for file in files for span in _spans(file.read_text())]
            names = sorted(span["name"] for span in spans)
            if "inlay.generate" in names and "inlay.attempt" in names:
                break
            asyncio.run(asyncio.sleep(0.1))
        ids = {span["attributes"]["request_id"] for span in spans if "request_id" in span["attributes"]}
        of_inlay = {span["context"]["trace_id"] for span in spans if span["name"].startswith("inlay.")}
        files_of = {span["name"]: file.name for file in files for span in _spans(file.read_text())}
        return {
            "names": names,
            "request_ids": sorted(ids),
            "header": done.headers.get("x-request-id"),
            "traces": len(of_inlay),
            "files": files_of,
            "errors": [span["name"] for span in spans if span["status"]["status_code"] == "ERROR"],
        }


def _spans(text: str) -> list[dict[str, Any]]:
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        span, at = decoder.raw_decode(text, at)
        found.append(span)
        while at < len(text) and text[at].isspace():
            at += 1
    return found


SCENARIOS = {
    each.__name__: each for each in (prefixes, kill, update, scale, keys, choices, addresses, cost, cpu, limits, trace)
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one scenario."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("scenario", choices=SCENARIOS)
    options.add_argument("package", type=Path)
    options.add_argument("--other", type=Path, help="the package of the update")
    options.add_argument("--replicas", type=int, default=4)
    options.add_argument("--requests", type=int, default=400)
    options.add_argument("--clients", type=int, default=64)
    options.add_argument("--policies", default="kv,random")
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--words", type=int, default=310, help="words of a shared prefix")
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--cache", default="150MB")
    options.add_argument("--what", choices=DISTURBANCES, default="replica")
    options.add_argument("--every", type=float, default=10.0)
    options.add_argument("--seconds", type=float, default=600.0)
    given = options.parse_args(arguments)
    isolate()
    print(json.dumps(SCENARIOS[given.scenario](given), indent=1))


if __name__ == "__main__":
    main()
