"""Shared by all commands: consoles, progress display and error handling."""

from __future__ import annotations

import errno
import json
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from typer.core import TyperCommand

from inlay.errors import ExitCode, InlayError, MachineError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

WIDTH = 120
"""Columns used when standard output is not a terminal."""

out = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=False)
err = Console(stderr=True, highlight=False)


class Command(TyperCommand):
    """A command inside `error_boundary`, whose help shows no type for flags and a short one for ranges."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            if getattr(param, "is_bool_flag", False) and param.metavar is None:
                param.metavar = ""
            elif param.metavar is None and (getattr(param, "min", None), getattr(param, "max", None)) != (None, None):
                param.metavar = "N"

    def get_help_option(self, ctx: Any) -> Any:
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option

    def invoke(self, ctx: Any) -> Any:
        with error_boundary():
            return super().invoke(ctx)


class GlobalOptions:
    """Options that precede the command name."""

    debug = False


global_options = GlobalOptions()
QUIET_SECONDS = 2.0
"""Without a terminal, steps are printed only after this time."""
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def error_boundary() -> Iterator[None]:
    """Turn errors into one sentence and an exit code; `--debug` also prints the traceback."""
    try:
        yield
    except InlayError as error:
        _fail(disk_full_error(error) or error)
    except KeyboardInterrupt:
        err.print("Interrupted. Unfinished output was discarded.")
        raise
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        full = disk_full_error(error)
        if full is not None:
            _fail(full)
        if global_options.debug:
            err.print(traceback.format_exc(), markup=False)
        text = f"{type(error).__name__}: {one_line(error)}"
        err.print(
            f"[bold red]error:[/] Internal error: {escape(text)}."
            " Please report it, with the output of `inlay --debug …`.",
            soft_wrap=True,
        )
        raise typer.Exit(int(ExitCode.INTERNAL)) from error


def _fail(error: InlayError) -> NoReturn:
    if global_options.debug:
        err.print(traceback.format_exc(), markup=False)
    text = "".join(each if each.isprintable() or each == "\n" else "�" for each in str(error))
    err.print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)
    raise typer.Exit(int(error.exit_code)) from error


def disk_full_error(error: BaseException) -> MachineError | None:
    """Return the error to report if a full disk is the cause. Compilers report it as text only.

    >>> print(disk_full_error(OSError(errno.ENOSPC, "No space left on device", "/data/package/weights.bin")))
    There is no space left for /data/package/weights.bin. Free some space, or write to another disk.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL_ERRNOS:
            named = cause.filename2 or cause.filename
            where = str(named or f"the output, here or in {tempfile.gettempdir()}")
            return MachineError(f"There is no space left for {where}.", "Free some space, or write to another disk.")
        if "No space left on device" in str(cause):
            where = f"{tempfile.gettempdir()}, which the compiler uses"
            return MachineError(
                f"There is no space left in {where}.", "Free some space, or set TMPDIR to another disk."
            )
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def progress(steps: Mapping[str, float]) -> Iterator[Callable[[str], None]]:
    """Show a progress bar with elapsed and remaining time; without a terminal, print a line per step.

    `steps` maps the expected steps to their relative durations. A step is identified by its name or by the first word
    of it. Further steps of the same kind extend the total.
    """
    if not err.is_terminal:
        yield _lines(time.monotonic())
        return
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(32),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=sum(steps.values()), left="")
        todo, running, start = dict(steps), 0.0, time.monotonic()

        def step(name: str) -> None:
            nonlocal running
            if not name:
                return
            bar.advance(task, running)
            kind = name if name in steps else name.split()[0]
            running = todo.pop(kind, steps.get(kind, 1.0))
            done = bar.tasks[task].completed
            total = max(bar.tasks[task].total or 0.0, done + running + sum(todo.values()))
            left = (time.monotonic() - start) * (total - done) / done if done else 0.0
            bar.update(task, description=name, total=total, left=f"about {left:.0f} s left" if left else "")

        yield step


@contextmanager
def progress_count(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of `total` are done: a bar on a terminal, otherwise a line now and then, after `QUIET_SECONDS`."""
    columns = TextColumn(what), BarColumn(32), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task, shown = bar.add_task(what, total=total), time.monotonic()
        line = _lines(shown)

        def show(done: int) -> None:
            nonlocal shown
            bar.update(task, completed=done)
            if not err.is_terminal and time.monotonic() - shown > QUIET_SECONDS:
                shown = time.monotonic()
                line(f"{what}: {done:,} of {total:,}")

        yield show


def _lines(start: float) -> Callable[[str], None]:
    """Print steps as lines, once `QUIET_SECONDS` have passed."""

    def step(name: str) -> None:
        seconds = time.monotonic() - start
        if name and seconds > QUIET_SECONDS:
            err.print(f"{seconds:4.0f} s  {name}", markup=False, soft_wrap=True)

    return step


def make_table(*columns: str, right: Collection[str] = (), fold: bool = False) -> Table:
    """Return a table without borders; columns in `right` are right-aligned, and with `fold` long cells are wrapped."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", overflow="fold" if fold else "ellipsis"
        )
    return table


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
