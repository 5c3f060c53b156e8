"""`inlay diff`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from inlay.cli.console import failing_kindly, out, print_json
from inlay.cli.models import DTypeOption, ModelArgument, TrustOption, read_program
from inlay.errors import ExitCode

if TYPE_CHECKING:
    from inlay.program.diff import Diff

_STYLES = {"changed": ("yellow", "yellow"), "removed": ("red", ""), "added": ("", "green"), "skipped": ("dim", "")}


def diff(
    left: ModelArgument,
    right: ModelArgument,
    context: Annotated[int, typer.Option("--context", help="Equal lines shown around a difference.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Compare two models or dumped programs by structure, folded and side by side.

    Exit code 1 when they differ.

    Example: [bold]inlay diff before.py after.py[/]
    """
    with failing_kindly():
        programs = [read_program(text, dtype, trust) for text in (left, right)]
        from inlay.program.diff import diff as compare

        found = compare(*programs)
        if as_json:
            rows = [{"kind": row.kind, "left": row.left, "right": row.right} for row in found.hunks(context)]
            counts = {"nodes": list(found.nodes), "operators": dict(found.operators), "bindings": list(found.bindings)}
            print_json({"equal": found.equal, **counts, "rows": rows})
        else:
            print_diff(found, context)
        if not found.equal:
            raise typer.Exit(int(ExitCode.FAILED))


def print_diff(found: Diff, context: int) -> None:
    """The rows that differ, side by side, and what changed in numbers."""
    if found.equal:
        out.print(f"The programs are the same: {found.nodes[0]} nodes.")
        return
    table = Table(box=None, pad_edge=False, show_header=False, expand=True)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(width=1)
    table.add_column(ratio=1, overflow="fold")
    for row in found.hunks(context):
        styles = _STYLES.get(row.kind, ("", ""))
        mark = {"changed": "~", "removed": "-", "added": "+"}.get(row.kind, "")
        left, right = _without_equal_types(row.left, row.right)
        table.add_row(Text(left, styles[0]), mark, Text(right, styles[1]))
    out.print(table)
    changes = ", ".join(f"{count:+d} {name}" for name, count in found.operators.items())
    out.print(f"nodes {found.nodes[0]} → {found.nodes[1]}" + (f"; {changes}" if changes else ""))
    for sentence in found.bindings:
        out.print(sentence, markup=False)
    if not found.bindings and not changes and not any(found.hunks(0)):
        out.print("The text is the same; types or the order of operands differ.")


def _without_equal_types(left: str, right: str) -> tuple[str, str]:
    """Types are shown only where they are all that differs: they would break most lines in two."""
    codes = [side.rpartition("  # ")[0] or side for side in (left, right)]
    return (left, right) if codes[0] == codes[1] and left != right else (codes[0], codes[1])
