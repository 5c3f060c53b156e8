"""Simulate a cluster of replicas: `python -m tools.cluster_simulation {record,capacity,run,validate} ...`.

Examples:
    python -m tools.cluster_simulation record PACKAGE steps.json --processes 2
    python -m tools.cluster_simulation run steps.json --workload chat --replicas 100 --rate 20 --seconds 120
    python -m tools.cluster_simulation validate PACKAGE --steps steps.json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.cluster_simulation import capacity, record, validate
from tools.cluster_simulation.policies import POLICIES, new_policy
from tools.cluster_simulation.report import draw, markdown, table
from tools.cluster_simulation.simulation import ClusterShape, Simulation
from tools.cluster_simulation.step_times import Recording
from tools.cluster_simulation.workload import SHAPES, Workload, WorkloadShape


def simulate(
    recording: Recording,
    cluster: ClusterShape,
    workload: Workload,
    policy: str,
    warmup: float = 0.0,
    predicted_seconds: float = 0.0,
) -> dict[str, Any]:
    """Simulate one policy; return its summary and its course over time."""
    started = time.perf_counter()
    simulation = Simulation(
        recording,
        cluster,
        workload,
        lambda clock: new_policy(
            policy, workload.seed, recording.shape.block_size, cluster.replicas, clock, predicted_seconds
        ),
        warmup=warmup,
    )
    measured = asyncio.run(simulation.run())
    summary = measured.summary() | {"real_seconds": time.perf_counter() - started, **simulation.policy.counts}
    return {"summary": summary, "course": measured.course()}


def _add_workload(options: argparse.ArgumentParser, rate: float, seconds: float) -> None:
    options.add_argument("--workload", choices=list(SHAPES), default="chat")
    options.add_argument("--rate", type=float, default=rate, help="sessions per second")
    options.add_argument("--seconds", type=float, default=seconds, help="seconds in which sessions arrive")
    options.add_argument("--seed", type=int, default=0)
    for each in fields(WorkloadShape):
        name = "--" + each.name.replace("_", "-")
        if each.type == "Range":
            options.add_argument(name, type=int, nargs=2, metavar=("LOW", "HIGH"))
        else:
            options.add_argument(name, type={"int": int, "float": float}[str(each.type)])


def _workload(given: argparse.Namespace, room: int) -> Workload:
    shape = SHAPES[given.workload]
    changes = {each.name: getattr(given, each.name) for each in fields(shape) if getattr(given, each.name) is not None}
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    return Workload(replace(shape, **changes), given.rate, given.seconds, given.seed, room)


def _run(given: argparse.Namespace) -> None:
    recording = Recording.read(given.steps)
    if recording.problem:
        Console(stderr=True).print(recording.problem)
    recording = recording.scaled(given.slowdown)
    if given.cache_blocks is not None:
        recording = replace(recording, shape=replace(recording.shape, cache_blocks=given.cache_blocks))
    cluster = ClusterShape(given.replicas, given.failure_mean, given.start_seconds, sync_seconds=given.sync_seconds)
    workload = _workload(given, recording.shape.max_seq_len)
    results = {}
    for policy in given.policies:
        results[policy] = simulate(recording, cluster, workload, policy, given.warmup, given.predicted_seconds)
        Console(stderr=True).print(f"{policy}: {results[policy]['summary']['real_seconds']:.0f} s")
    Console(width=180).print(table(results))
    if given.markdown:
        print(markdown(results))
    about = {"cluster": asdict(cluster), "workload": asdict(workload), "engine": asdict(recording.shape)}
    if given.json:
        given.json.write_text(json.dumps(_rounded({"about": about, "results": results})) + "\n")
    if given.svg:
        title = f"{given.workload}: {cluster.replicas} replicas, {workload.rate:g} sessions per second"
        given.svg.write_text(draw(results, title))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) and value < 1e5 else value


def main() -> None:
    """Run a subcommand."""
    gc.set_threshold(100_000, 50, 50)  # there are many objects and few cycles
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = options.add_subparsers(required=True)
    record.add_command(commands)
    capacity.add_command(commands)
    run = commands.add_parser("run", help="simulate policies")
    run.add_argument("steps", type=Path, help="a recording")
    run.add_argument("--replicas", type=int, default=10)
    run.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    run.add_argument("--warmup", type=float, default=0.0, help="seconds that are not part of the summary")
    run.add_argument(
        "--failure-mean", type=float, default=0.0, help="mean seconds to the failure of a replica; 0: none"
    )
    run.add_argument("--start-seconds", type=float, default=30.0, help="seconds until a failed replica is back")
    run.add_argument("--sync-seconds", type=float, default=0.05, help="interval at which KV events are applied")
    run.add_argument(
        "--predicted-seconds",
        type=float,
        default=3.0,
        help="real seconds for which the prompt of a placed request counts as cached; 0: not at all",
    )
    run.add_argument("--cache-blocks", type=int, help="blocks of each prefix cache; default: as recorded")
    run.add_argument("--slowdown", type=float, default=1.0, help="factor of all step times")
    run.add_argument("--json", type=Path)
    run.add_argument("--svg", type=Path)
    run.add_argument("--markdown", action="store_true")
    _add_workload(run, 4.0, 60.0)
    run.set_defaults(run=_run)
    real = commands.add_parser("validate", help="compare a simulation with two real servers")
    _add_workload(real, 0.3, 90.0)
    validate.add_options(real)
    real.set_defaults(
        run=lambda given: validate.run(given, _workload(given, Recording.read(given.steps).shape.max_seq_len))
    )
    given = options.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
