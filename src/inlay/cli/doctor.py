"""`inlay doctor`"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from inlay.cli.console import make_table, out, print_json
from inlay.errors import ExitCode
from inlay.machine import CheckStatus, run_checks

_MARKS = {CheckStatus.OK: "[green]ok[/]", CheckStatus.WARN: "[yellow]warn[/]", CheckStatus.FAIL: "[red]fail[/]"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False) -> None:
    """Report what is missing on this machine, and how to fix it.

    Exit code 1: a check failed.

    Example: [bold]inlay doctor[/]
    """
    checks = list(run_checks())
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        table = make_table("", "check", "found", "remedy", fold=True)
        for check in checks:
            table.add_row(_MARKS[check.status], check.name, escape(check.found), escape(check.remedy))
        out.print(table)
    if any(check.status is CheckStatus.FAIL for check in checks):
        raise typer.Exit(int(ExitCode.FAILED))
