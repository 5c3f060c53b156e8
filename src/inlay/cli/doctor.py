"""`inlay doctor`"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from inlay.cli.console import failing_kindly, out, print_json
from inlay.errors import ExitCode
from inlay.host import Status, examine

_MARKS = {Status.OK: "[green]ok[/]", Status.WARN: "[yellow]warn[/]", Status.FAIL: "[red]fail[/]"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """Tell what is missing on this machine, and how to mend it.

    Exit code 1 when something does not work.

    Example: [bold]inlay doctor[/]
    """
    with failing_kindly():
        checks = list(examine())
        if as_json:
            print_json([asdict(check) for check in checks])
        else:
            table = Table(box=None, pad_edge=False)
            for column in ("", "what", "found", "what to do"):
                table.add_column(column, overflow="fold")
            for check in checks:
                table.add_row(_MARKS[check.status], check.name, check.found, check.remedy)
            out.print(table)
        if any(check.status is Status.FAIL for check in checks):
            raise typer.Exit(int(ExitCode.FAILED))
