"""`inlay diff`"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from inlay.cli.console import out, print_json
from inlay.cli.model_options import AtOption, DTypeOption, Level, TrustOption, read_program
from inlay.errors import ExitCode

if TYPE_CHECKING:
    from inlay.program.program import Program
    from inlay.program.text.diff import Diff

_STYLES = {"changed": ("red", "green"), "removed": ("red", ""), "added": ("green", ""), "skipped": ("dim", "")}
"""Colors of the left and right half of a line; only changed lines have a second color."""

SideArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|PACKAGE|LOCK",
        help="A model or dump (see `inlay show`), a package, or a lock file; both of the same kind.",
        show_default=False,
    ),
]


def diff(
    left: SideArgument,
    right: SideArgument,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write an HTML page instead of printing.")
    ] = None,
    context: Annotated[int, typer.Option("--context", help="Unchanged lines shown around a difference.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    at: AtOption = Level.CAPTURED,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Compare two models or dumps by structure, folded and side by side; or two packages, or two lock files.

    Exit code 1: they differ.

    Example: [bold]inlay diff before.py after.py[/]

    Example: [bold]inlay diff ./package-1 ./package-2 -o diff.html[/]
    """
    from inlay.insight.report.comparison import require_same_kind

    if require_same_kind(left, right) != "program":
        equal = _tables(left, right, output, as_json)
    else:
        programs = read_program(left, dtype, trust, at), read_program(right, dtype, trust, at)
        equal = _programs(programs, (left, right), output, as_json, context)
    if not equal:
        raise typer.Exit(int(ExitCode.FAILED))


def _tables(left: str, right: str, output: Path | None, as_json: bool) -> bool:
    """Compare two packages or locks and report the rows that differ; return whether they are equal."""
    from inlay.cli.report import write_report
    from inlay.insight.report.comparison import build_table_page, compare_tables

    rows = compare_tables(left, right)
    differing = [row for row in rows if row.is_different]
    if output is not None:
        write_report(build_table_page(left, right, rows), output)
    if as_json:
        print_json({"equal": not differing, "rows": [vars(row) for row in differing]})
    elif output is None:
        for row in differing:
            text = f"{row.table}: {row.name}: {row.left or 'none'} → {row.right or 'none'}"
            out.print(text, markup=False, soft_wrap=True)
        out.print(f"{len(differing)} of {len(rows)} rows differ.")
    return not differing


def _programs(
    programs: tuple[Program, Program], names: tuple[str, str], output: Path | None, as_json: bool, context: int
) -> bool:
    from inlay.program.text.diff import diff as compare

    if output is not None:
        from inlay.cli.report import write_report
        from inlay.insight.report.comparison import build_program_page

        write_report(build_program_page(*programs, names), output)
    found = compare(*programs)
    if as_json:
        rows = [{"kind": row.kind, "left": row.left, "right": row.right} for row in found.hunks(context)]
        counts = {
            "nodes": list(found.node_counts),
            "operators": dict(found.operator_deltas),
            "bindings": list(found.binding_changes),
        }
        print_json({"equal": found.is_equal, **counts, "rows": rows})
    elif output is None:
        print_diff(found, context)
    return found.is_equal


def print_diff(found: Diff, context: int | None = None) -> None:
    """Print differences side by side; without `context`, each kind of difference once. See `diff_lines`."""
    from inlay.program.text.side_by_side import diff_lines

    for line in diff_lines(found, out.width, context):
        text = Text(line.text)
        left, right = _STYLES.get(line.kind, ("", ""))
        text.stylize(left, 0, line.right_start or len(line.text))
        text.stylize(right, line.right_start or len(line.text))
        out.print(text, soft_wrap=True)
