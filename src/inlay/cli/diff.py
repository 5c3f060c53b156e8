"""`inlay diff`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from inlay.cli.console import failing_kindly, out, print_json
from inlay.cli.models import DTypeOption, ModelArgument, TrustOption, read_program
from inlay.errors import ExitCode

if TYPE_CHECKING:
    from inlay.program.diff import Diff

_STYLES = {"changed": ("red", "green"), "removed": ("red", ""), "added": ("green", ""), "skipped": ("dim", "")}
"""Colours of the two halves of a line; only changed lines have a second one."""


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


def print_diff(found: Diff, context: int | None = None) -> None:
    """What differs, side by side; without a `context` each way of differing once. See `diff_lines`."""
    from inlay.program.beside import diff_lines

    for line in diff_lines(found, out.width, context):
        text = Text(line.text)
        left, right = _STYLES.get(line.kind, ("", ""))
        text.stylize(left, 0, line.middle or len(line.text))
        text.stylize(right, line.middle or len(line.text))
        out.print(text, soft_wrap=True)
