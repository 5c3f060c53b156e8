"""The command `python -m tools.fuzz_writes`."""

from __future__ import annotations

import json
import random
import time
from typing import Annotated, Any

import typer
from rich.progress import Progress

from inlay.cli.console import err, error_boundary, out
from tools.fuzz_writes.check import WriteFuzzCounts, check, reduce_graph
from tools.fuzz_writes.grow import generate_graph

_MOST_FAILURES = 5


def fuzz(
    graphs: Annotated[int, typer.Option("--graphs", help="Number of graphs to generate.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Random seed; the same seed gives the same graphs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
) -> None:
    """Generate graphs with writes and shared storage, run fix_functionalization, and compare every byte.

    Example: [bold]python -m tools.fuzz_writes --graphs 20000 --seed 7[/]
    """
    with error_boundary():
        report = run(graphs, seed)
        if as_json:
            typer.echo(json.dumps(report, indent=2))
        else:
            _print(report)
        if report["failures"]:
            raise typer.Exit(1)


def run(graphs: int, seed: int) -> dict[str, Any]:
    """Generate and check graphs; return the counts."""
    tally, start = WriteFuzzCounts(), time.perf_counter()
    failures: list[dict[str, Any]] = []
    with Progress(console=err, transient=True) as progress:
        for index in progress.track(range(graphs), description="checking"):
            module, inputs = generate_graph(random.Random(f"{seed}/{index}"))
            problem = check(module, inputs, tally)
            if problem:
                small = reduce_graph(module, inputs)
                failures.append({"graph": index, "problem": check(small, inputs), "smallest": str(small.graph)})
                if len(failures) >= _MOST_FAILURES:
                    break
    return {
        "graphs": tally.graphs,
        "without a write": tally.without_writes,
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "in place": tally.in_place,
        "stayed": dict(tally.refusals.most_common()),
        "copies removed": tally.copies_removed,
        "left wrapped": tally.remaining_wrappers,
        "failures": failures,
    }


def _print(report: dict[str, Any]) -> None:
    for failure in report["failures"]:
        out.print(f"graph {failure['graph']}: {failure['problem']}\n{failure['smallest']}", markup=False)
    out.print(f"{report['in place']:,} writes are in place, {report['copies removed']:,} copies to inputs were removed")
    for reason, count in report["stayed"].items():
        out.print(f"{count:,} were not changed: {reason}")
    out.print(f"{report['left wrapped']:,} calls remain wrapped, in layouts that only the wrapper can copy")
    out.print(f"{report['without a write']:,} graphs without a write are not counted")
    out.print(f"{report['graphs']:,} graphs, {report['seconds']} s, {len(report['failures'])} failure(s)")


if __name__ == "__main__":
    typer.run(fuzz)
