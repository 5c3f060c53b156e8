"""`inlay watch`"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from inlay import watch_startup
from inlay.cli.console import err, make_table, out, print_json
from inlay.errors import UsageError, printable

if TYPE_CHECKING:
    from inlay.insight.watch.records import PassRecord

_MOST = 5


def watch(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND…", help="Program and arguments.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the records.")] = Path("watched"),
    use_caches: Annotated[
        bool,
        typer.Option("--use-caches", help="Leave torch.compile's caches on. Passes of cached graphs do not run."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
) -> None:
    """Run a program and record its graph passes: Inductor's, vLLM's, torchao's and your own.

    For each pass: its matches, its nearest misses and their reasons. The program and what it compiles do not change.
    `inlay explain`, `lock` and `report` take the folder.

    Example: [bold]inlay watch -o watched -- python train.py[/]

    Example: [bold]inlay watch -- python train.py && inlay lock watched -o passes.lock[/]
    """
    from inlay.insight.watch.folder import read_passes
    from inlay.watch_startup import is_watch_folder

    _clear(output, is_watch_folder(output))
    code = run_watched(command, output, use_caches, stdout=sys.stderr if as_json else None).returncode
    if is_watch_folder(output):
        passes = list(read_passes(output).values())
        if as_json:
            print_json([each.to_json() for each in passes])
        else:
            print_passes(passes)
    else:
        err.print("No graph pass ran: nothing was compiled, or another Python ran it.", markup=False)
    raise typer.Exit(code if code >= 0 else 128 - code)


def run_watched(
    command: list[str], folder: Path, use_caches: bool = False, limit: int | None = None, stdout: Any = None
) -> subprocess.CompletedProcess[str]:
    """Run a program with records in a folder; with a limit, apply only so many matches and capture the output."""
    site = str(Path(watch_startup.__file__).parent / "watch_site")
    paths = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, watch_startup.VARIABLE: str(folder.resolve()), "PYTHONPATH": paths}
    if not use_caches:
        environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    environment.pop("INLAY_WATCH_LIMIT", None)
    if limit is not None:
        environment["INLAY_WATCH_LIMIT"] = str(limit)
    pipe, output = (None, None) if limit is None else (subprocess.PIPE, subprocess.STDOUT)
    if limit is not None:
        environment["PYTHONUNBUFFERED"] = "1"  # both outputs in the order in which they are printed
    try:
        process = subprocess.Popen(
            command, env=environment, text=True, errors="replace", stdout=pipe or stdout, stderr=output
        )
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}.", "Name a program after --.") from error
    while True:
        try:
            printed = process.communicate()
            return subprocess.CompletedProcess(command, process.returncode, *printed)
        except KeyboardInterrupt:  # the program got it too, and ends as it does without Inlay
            continue


def _clear(folder: Path, is_watched: bool) -> None:
    if folder.exists() and not is_watched and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and has no records of a watch.", "Name another folder with -o.")
    for file in folder.glob(f"*{watch_startup.SUFFIX}"):
        file.unlink()


def print_passes(passes: list[PassRecord], show_all: bool = False, is_named: bool = False) -> None:
    """Print the passes that matched or nearly did, their near misses, and what functions changed and left.

    With `is_named` the user has named the pass: it is printed in any case.
    """
    from inlay.insight.watch.folder import left_calls
    from inlay.insight.watch.records import MAX_RECORDS

    numbers = ("patterns", "matches", "near misses")
    table = make_table("pass", *numbers, right=numbers, fold=True)
    shown = [each for each in passes if is_named or each.matches or each.near_misses or each.changes or each.error]
    for each in shown:
        if not each.num_patterns:
            continue
        missed = sum(len(finding.roots) for finding in each.near_misses)
        table.add_row(Text(printable(each.name)), str(each.num_patterns), str(each.matches), str(missed))
    if table.row_count:
        out.print(table)
    for each in shown:
        changed = "; ".join(f"{change} × {number}" for change, number in sorted(each.changes.items()))
        findings = each.findings if show_all else each.near_misses
        lines = [changed] * bool(changed) + left_calls(each)
        lines += [f"{finding.transform}: {finding.text}" for finding in findings]
        if lines or each.error:
            out.print(Text(f"\n{printable(each.name)}", style="bold"))
        if is_named and not each.matches and not lines:
            out.print(f"\nNothing in the graphs resembles the patterns of {printable(each.name)}.", markup=False)
        for line in lines if show_all else lines[:_MOST]:
            out.print(Padding(Text(printable(line)), (0, 0, 0, 2)))
        if not show_all and len(lines) > _MOST:
            out.print(Padding(Text(f"… and {len(lines) - _MOST} more (inlay explain FOLDER --all)"), (0, 0, 0, 2)))
        if each.error:
            out.print(Padding(Text(f"The record is incomplete: {printable(each.error)}"), (0, 0, 0, 2)))
    silent = len(passes) - len(shown)
    if silent:
        out.print(Text(f"{silent} passes without a match, near miss or change.", style="dim"))
    if dropped := sum(each.dropped for each in passes):
        out.print(Text(f"{dropped} records were dropped: at most {MAX_RECORDS} of a process are kept."))
