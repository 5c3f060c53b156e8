"""`inlay bench`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from inlay.cli.console import err, failing_kindly, out, print_json, progress
from inlay.cli.inspect import PackageArgument  # noqa: TC001 - typer reads the annotation
from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRIPTS = Path("benchmarks/contestants")


def bench(
    package: PackageArgument,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="PEERS", help="The environment that peers are installed in.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The GGUF file or folder that others read: what the package was built from."),
    ] = None,
    contestants: Annotated[
        list[str] | None,
        typer.Option(
            "--contestants",
            metavar="NAME",
            help="Who takes part beside the package, such as NAME or NAME:VARIANT; may be given several times;"
            " by default all peers.",
        ),
    ] = None,
    scripts: Annotated[Path, typer.Option("--scripts", help="The folder of the contestants' scripts.")] = SCRIPTS,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often everybody takes a turn.")] = 5,
    batch: Annotated[int, typer.Option("--batch", min=2, help="Sequences that are decoded together.")] = 16,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.svg", help="Draw bars against the limit.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Measure a package: against its own linear layers run alone, and against others, taking turns in one run.

    Nothing else should run meanwhile.

    Example: [bold]inlay bench ./smollm2[/]

    Example: [bold]inlay bench ./smollm2 --against ./peers --model model.gguf --picture speed.svg[/]
    """
    with failing_kindly():
        from inlay.bench.figures import report
        from inlay.bench.picture import draw
        from inlay.bench.rounds import Workload, entries_for, race, steps
        from inlay.bench.scripts import find, itself
        from inlay.compile.load import read_manifest

        manifest, _ = read_manifest(package)
        if manifest.kind != "decoder":
            raise UsageError(f"{package} is a compiled program, not a language model.", "Only those can be measured.")
        if picture is not None and not picture.parent.is_dir():
            raise UsageError(f"{picture.parent} is no folder.", "Make it first.")
        us = itself(package, manifest)
        others = find(scripts, against, contestants, us.arguments | {"model": model and str(Path(model).resolve())})
        slots, _, room, _ = (int(size) for size in manifest.states[0].shape)
        workload, notes = Workload(batch=batch).within(room, slots)
        entries = entries_for(us, others, workload, slots)
        with progress(steps(entries, rounds)) as step:
            raced = race(entries, rounds, step)
        if us.name not in raced.samples:
            raise UsageError(raced.notes[0])
        raced.notes[:0] = notes
        made = {"package": str(package), "model": manifest.model, **report(raced, batch)}
        if picture is not None:
            picture.write_text(draw(made, f"{manifest.model}, {manifest.target.threads} threads"))
        if as_json:
            print_json(made)
            return
        _print(made, batch)
        if picture is not None:
            err.print(f"Wrote {picture}.", markup=False)


def _print(made: Mapping[str, Any], batch: int) -> None:
    from inlay.bench.figures import Spread

    table = Table(box=None, pad_edge=False)
    tasks = ("decode", "deep_decode", "prefill", f"batch{batch}", "first_token")
    columns = ("", "decode", "p50", "p99", "deep decode", "prefill", f"batch {batch}", "first token")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for name, each in made["contestants"].items():
        done = each["tasks"]
        cells = [_cell(done, task, Spread) for task in tasks]
        spent = [f"{done['decode'][key]:.1f} ms" if "decode" in done else "" for key in ("p50_ms", "p99_ms")]
        table.add_row(name, cells[0], *spent, *cells[1:])
    out.print(table)
    out.print("\nTokens a second (first token: seconds, new process); median of rounds, lowest … highest.\n")
    ratios = Table(box=None, pad_edge=False)
    for column in ("Inlay over", *tasks):
        ratios.add_column(column.replace("_", " "), justify="left" if column == "Inlay over" else "right")
    for name, times in made["against"].items():
        ratios.add_row(name, *(str(Spread(**times[task])) if task in times else "" for task in tasks))
    if made["against"]:
        out.print(ratios)
        out.print()
    for name, share in made["shares"].items():
        out.print(f"{name.replace('_', ' ')}: {Spread(**share)}")
    for note in made["notes"]:
        err.print(note, markup=False)


def _cell(done: Mapping[str, Any], task: str, spread: Any) -> str:
    if task not in done:
        return ""
    return str(spread(**(done[task].get("tok_s") or done[task]["seconds"])))
