"""`inlay verify`"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from inlay.cli.console import error_boundary, out, print_json
from inlay.cli.model_options import DTypeOption, ModelArgument, TrustOption, read_program, resolve_config
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from inlay.insight.verify import NumericsVerdict


def verify(
    model: ModelArgument,
    seed: Annotated[int, typer.Option("--seed", help="Of the random inputs.")] = 0,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="How many random inputs; errors are theirs together.")
    ] = 4,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="LOCK|PACKAGE", help="Also compare how often transforms match with this."),
    ] = None,
    files: ConfigOption = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Say what each transform does to numbers and types: nothing, rounding, or wrong; exit code 1 if anything is.

    The program runs on random inputs before and after every transform; the referee is the captured program in float64.

    Example: [bold]inlay verify ./my-model --dtype bfloat16[/]
    """
    with error_boundary():
        from inlay.insight.verify import FAILURES, NumericsCheck
        from inlay.transforms import configure, run

        expected = read_expected_sites(against) if against is not None else {}
        program = read_program(model, dtype, trust)
        seen = NumericsCheck(expected, seed, rounds)
        run(program, configure(resolve_config(program, files, settings)), [seen])
        if as_json:
            print_json([verdict.to_json() for verdict in seen.verdicts])
        else:
            _print(seen.verdicts)
        if any(verdict.change in FAILURES for verdict in seen.verdicts):
            raise typer.Exit(int(ExitCode.FAILED))


def read_expected_sites(path: Path) -> dict[str, int]:
    """How often transforms matched when a lock or a package was made."""
    from inlay.transforms.lock import read_lock

    file = path / "current" / "matches.lock" if path.is_dir() else path
    models = read_lock(file).models
    if len(models) != 1:
        raise UsageError(f"{path} is about {len(models)} models.", "Lock this one alone.")
    return {key: each.sites for key, each in models[0].transforms.items()}


def _print(verdicts: list[NumericsVerdict]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("transform", "sites", "change", "difference", "error before", "error after", ""):
        right = column in ("sites", "difference", "error before", "error after")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for each in verdicts:
        numbers = (f"{value:.1e}" if value else "0" for value in (each.difference, each.error_before, each.error_after))
        worst = "; ".join(f"{node.node} {node.error:.1e} ({node.source})" for node in each.worst)
        table.add_row(each.transform, str(each.sites), each.change.value, *numbers, each.reason or worst)
    out.print(table, markup=False)
