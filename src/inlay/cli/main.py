"""`inlay`: one module per command, in four groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from inlay import derived_cache
from inlay._version import __version__
from inlay.cli import (
    bench,
    bisect,
    build,
    cache,
    candidates,
    chat,
    cluster,
    diff,
    doctor,
    embed,
    explain,
    inspect,
    lock,
    passes,
    prove,
    refit,
    report,
    review,
    run,
    serve,
    show,
    streams,
    verify,
    watch,
)
from inlay.cli.console import Command, global_options
from inlay.openmp import share_cores

if TYPE_CHECKING:
    from collections.abc import Callable

app = typer.Typer(
    name="inlay",
    help="Compile a language model into a package, run and serve it, and inspect every graph pass.",
    epilog="Exit codes: 0 success, 1 check failed, 2 invalid command line, 3 model not found or unreadable, 4 model"
    " cannot be captured, 5 invalid program, 6 transform failed, 7 wrong number of matches, 8 invalid package, 9 no"
    " disk space or port in use, 70 bug in Inlay.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Build and run": (build.build, run.run, chat.chat, embed.embed, serve.serve, bench.bench),
    "Inspect": (
        *(show.show, explain.explain, report.report, inspect.inspect, diff.diff, candidates.candidates),
        *(streams.streams, watch.watch, passes.passes, passes.config),
    ),
    "Check": (verify.verify, prove.prove, bisect.bisect, lock.lock, lock.check, review.review),
    "Maintain": (doctor.doctor, refit.refit),
}
"""Panel of the help → its commands, which have the names of their functions."""
for _group, _commands in GROUPS.items():
    for _command in _commands:
        app.command(cls=Command, rich_help_panel=_group)(_command)
app.add_typer(cluster.app, name="cluster", rich_help_panel="Build and run")
app.add_typer(cache.app, name="cache", rich_help_panel="Maintain")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"inlay {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""
    global_options.debug = debug


def main() -> None:
    """Entry point of the `inlay` command."""
    share_cores()
    derived_cache.enable()
    app()
