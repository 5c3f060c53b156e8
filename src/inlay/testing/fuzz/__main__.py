"""The command `python -m inlay.testing.fuzz`."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inlay.errors import InlayError
from inlay.testing.fuzz.checker import Failure, FuzzCounts, InvalidProgramError, check
from inlay.testing.fuzz.generator import generate_program
from inlay.testing.fuzz.reducer import reduce_failure, render_script
from inlay.testing.fuzz.templates import Templates
from inlay.transforms.base import find_transform, registry

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_FAILURES = 5
out, err = Console(highlight=False), Console(stderr=True, highlight=False)


def fuzz(
    graphs: Annotated[
        int, typer.Option("--graphs", help="Number of programs to generate, about five sites each.")
    ] = 200,
    seed: Annotated[int, typer.Option("--seed", help="Random seed; the same seed gives the same programs.")] = 0,
    only: Annotated[list[str] | None, typer.Option("--pass", help="Only sites of this transform; repeatable.")] = None,
    folder: Annotated[Path, typer.Option("-o", "--output", help="Folder for the scripts of failures.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Output JSON.")] = False,
) -> None:
    """Generate random programs around the patterns of every transform, run all transforms, and compare results.

    Example: [bold]python -m inlay.testing.fuzz --graphs 1000 --seed 7[/]
    """
    try:
        for name in only or ():
            find_transform(name)
    except InlayError as error:
        raise typer.BadParameter(str(error)) from error
    report = run(graphs, seed, only or [], folder)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    if report["failures"]:
        raise typer.Exit(1)


def run(
    graphs: int,
    seed: int,
    site_transforms: Sequence[str],
    folder: Path = Path(),
    *,
    templates: Templates | None = None,
    transforms: Sequence[str] = (),
) -> dict[str, Any]:
    """Generate and check programs; return the counts. Templates can be reused. Without `transforms`, all run."""
    templates = templates or Templates(site_transforms, variants=4 + graphs // 400, seed=seed)
    tally, drawn, uncomputed = FuzzCounts(), Counter[str](), Counter[str]()
    failures: list[dict[str, str]] = []
    places, computed, start = 0, 0, time.perf_counter()

    def draw(rng: random.Random) -> Any:
        template = templates.sample(rng)
        drawn[template.transform] += 1
        return template

    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("checking", total=graphs)
        for index in range(graphs):
            rng = random.Random(f"{seed}/{index}")
            program, inputs, count = generate_program(rng, draw)
            try:
                found = check(program, inputs, transforms, tally)
            except InvalidProgramError as error:
                uncomputed[_kind(error)] += 1
                continue
            places, computed = places + count, computed + 1
            if found is not None:
                failures.append(_write(found, seed, index, folder))
                if len(failures) >= _MOST_FAILURES:
                    break
            progress.update(task, advance=1)
    return {
        "graphs": computed,
        "not computed": dict(uncomputed.most_common()),
        "seed": seed,
        "places": places,
        "seconds": round(time.perf_counter() - start, 1),
        "transforms": {
            name: {"drawn": drawn[name], "fired": tally.matches[name], "refused or missed": tally.misses[name]}
            for name in registry()
        },
        "values": tally.values,
        "ill-conditioned": tally.ill_conditioned,
        "failures": failures,
    }


def _kind(error: Exception) -> str:
    """Return an error message without the numbers that differ between graphs."""
    return re.sub(r"[\d\[\], ]*\d[\d\[\], ]*", " # ", str(error))[:100].strip()


def _write(found: Failure, seed: int, index: int, folder: Path) -> dict[str, str]:
    small = reduce_failure(found)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"fuzz_{small.transform}_{seed}_{index}.py"
    file.write_text(render_script(small, f"python -m inlay.testing.fuzz --seed {seed}, graph {index}"))
    err.print(f"{small.transform}: {small.problem} → {file}", markup=False, soft_wrap=True)
    return {"transform": small.transform, "problem": small.problem, "script": str(file)}


def _print(report: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("transform", "drawn", "fired", "refused or missed"):
        table.add_column(column, justify="left" if column == "transform" else "right")
    for name, counts in report["transforms"].items():
        table.add_row(name, *(f"{value:,}" for value in counts.values()))
    out.print(table)
    for reason, count in report["not computed"].items():
        out.print(f"{count:,} invalid programs are not counted: {reason}", markup=False)
    share = report["ill-conditioned"] / max(report["values"], 1)
    out.print(f"{report['values']:,} values compared within rounding, {share:.2%} of them ill-conditioned")
    out.print(f"{report['places']:,} sites in {report['graphs']:,} programs, {report['seconds']} s, ", end="")
    out.print(f"{len(report['failures'])} failure(s)")


if __name__ == "__main__":
    typer.run(fuzz)
