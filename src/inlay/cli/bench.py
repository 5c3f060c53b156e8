"""`inlay bench`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from inlay.cli.console import err, out, print_json, progress
from inlay.cli.inspect import PackageArgument  # noqa: TC001 - typer reads the annotation
from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.package.manifest import Manifest

SCRIPTS = Path("tools/benchmarks/contestants")


def bench(
    package: PackageArgument,
    peers: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="PEERS", help="Virtual environment of the engines to compare with.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="GGUF file or folder from which PACKAGE was built, for the other engines."),
    ] = None,
    contestants: Annotated[
        list[str] | None,
        typer.Option(
            "--contestants",
            metavar="NAME",
            help="Engine to compare with the package: NAME or NAME:VARIANT. May be given several times."
            " By default all peers run.",
        ),
    ] = None,
    scripts: Annotated[Path, typer.Option("--scripts", help="Folder of the benchmark scripts.")] = SCRIPTS,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often each engine runs every task.")] = 5,
    batch: Annotated[int, typer.Option("--batch", min=2, help="Sequences in the batched decode task.")] = 16,
    chart: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.svg", help="Write a bar chart of the rates and limits.")
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Only time the kernel choices in PACKAGE again: what autotune would change, p50 and p99."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
) -> None:
    """Measure the speed of a package, relative to its roofline (its linear layers alone) and to other engines.

    Comparing with other engines needs a checkout of Inlay's repository. All engines take turns in one run. Do not run
    anything else on the machine at the same time.

    Example: [bold]inlay bench ./smollm2[/]

    Example: [bold]inlay bench ./smollm2 --probe[/]

    Example: [bold]inlay bench ./smollm2 --against ./peers --model model.gguf --picture speed.svg[/]
    """
    from inlay.bench.chart import draw
    from inlay.bench.contestants import find, package_contestant
    from inlay.bench.metrics import report
    from inlay.bench.rounds import Workload, assign_tasks, run_rounds, steps
    from inlay.lowering.executable import CacheSizes
    from inlay.package.loader import read_manifest

    manifest, _ = read_manifest(package)
    if probe:
        _probe(manifest, as_json)
        return
    if manifest.kind != "decoder":
        raise UsageError(f"{package} is a compiled program, not a language model.", "Choose a language model.")
    if chart is not None and not chart.parent.is_dir():
        raise UsageError(f"{chart.parent} is not a folder.", "Create it first.")
    us = package_contestant(package, manifest)
    others = find(scripts, peers, contestants, us.arguments | {"model": model and str(Path(model).resolve())})
    cache = CacheSizes.from_bindings(manifest.bindings)
    assert cache is not None  # a decoder has a KV cache
    workload, notes = Workload(batch=batch).fit(cache.max_seq_len, cache.slots)
    entries = assign_tasks(us, others, workload, cache.slots)
    with progress(steps(entries, rounds)) as step:
        raced = run_rounds(entries, rounds, step)
    if us.name not in raced.samples:
        raise UsageError(raced.notes[0])
    raced.notes[:0] = notes
    made = {"package": str(package), "model": manifest.model, **report(raced, batch)}
    if chart is not None:
        chart.write_text(draw(made, f"{manifest.model}, {manifest.target.threads} threads"))
    if as_json:
        print_json(made)
        return
    _print(made, batch)
    if chart is not None:
        err.print(f"Wrote {chart}.", markup=False)


def _print(made: Mapping[str, Any], batch: int) -> None:
    from inlay.bench.metrics import Spread

    tasks = ("decode", "prefill", f"batch{batch}", "deep_decode")
    rates = _table("tokens per second", *tasks, "p50 / p99", "first token")
    for name, each in made["contestants"].items():
        done = each["tasks"]
        spent = f"{done['decode']['p50_ms']:.1f} / {done['decode']['p99_ms']:.1f}" if "decode" in done else ""
        cells = (str(Spread(**done[task]["tok_s"])) if task in done else "" for task in tasks)
        rates.add_row(name, *cells, spent, f"{done['first_token']['seconds']['median']:.2f} s")
    out.print(rates)
    if made["against"]:
        compared = (*tasks, "first_token")
        ratios = _table("Inlay speedup", *compared)
        for name, times in made["against"].items():
            ratios.add_row(name, *(str(Spread(**times[task])) if task in times else "" for task in compared))
        out.print()
        out.print(ratios)
    shares = _table("Inlay, fraction of limit", "")
    for name, share in made["shares"].items():
        shares.add_row(name.replace("_", " "), str(Spread(**share)))
    out.print()
    out.print(shares)
    out.print(
        f"\nMedian of {made['rounds']} rounds (lowest–highest). p50, p99: ms per token. First token: in a new process."
    )
    for note in made["notes"]:
        err.print(note, markup=False)


WORTH = 1.05
"""A smaller gain is within the noise of most machines."""


def _probe(manifest: Manifest, as_json: bool) -> None:
    from inlay.bench.probe import probe_kernels

    with progress({"timing": 1.0}) as step:
        rows = probe_kernels(manifest, step)
    if as_json:
        print_json([row.to_json() for row in rows])
        return
    if not rows:
        out.print("The package contains no measured kernel choice: it has no packed weights, or portable kernels.")
        return
    table = _table("bucket", "linear layer", "bits", "rows", "in package", "p50 / p99 µs", "autotune", "p50 / p99 µs ")
    for row in rows:
        times = [f"{row.p50_us[way]:g} / {row.p99_us[way]:g}" for way in (row.recorded, row.tuned)]
        layer = f"{row.features} × {row.depth}"
        other = (row.tuned, times[1]) if row.tuned != row.recorded else ("same", "")
        table.add_row(row.bucket, layer, str(row.bits), str(row.rows), row.recorded, times[0], *other)
    out.print(table)
    changed = sum(row.tuned != row.recorded for row in rows)
    faster = sum(row.gain > WORTH for row in rows)
    out.print(
        f"\nAutotune would change {changed} of {len(rows)} choices. {faster} of them would gain more than"
        f" {WORTH - 1:.0%} (p50). To apply them, build again on this machine."
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column == columns[0] else "right")
    return table
