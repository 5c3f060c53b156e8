"""`inlay`: one file a verb."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay import __version__
from inlay.cli import (
    bench,
    bisect,
    build,
    cache,
    candidates,
    diff,
    doctor,
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
)
from inlay.cli.console import settings
from inlay.threads import share_cores

app = typer.Typer(
    name="inlay",
    help="Turn a stock PyTorch LLM into a compiled inference package, and see what every graph pass did and why.",
    epilog="Exit codes: 0 fine, 1 a check said no, 2 wrong usage, 3 bad MODEL, 4 no capture, 5 bad program,"
    " 6 failed transform, 7 broken contract, 8 bad package, 9 no space or no port, 70 defect.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("build")(build.build)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("prove")(prove.prove)
app.command("refit")(refit.refit)
app.command("bench")(bench.bench)
app.command("inspect")(inspect.inspect)
app.command("doctor")(doctor.doctor)
app.command("show")(show.show)
app.command("report")(report.report)
app.command("explain")(explain.explain)
app.command("candidates")(candidates.candidates)
app.command("diff")(diff.diff)
app.command("bisect")(bisect.bisect)
app.command("lock")(lock.lock)
app.command("check")(lock.check)
app.command("streams")(streams.streams)
app.command("verify")(verify.verify)
app.command("review")(review.review)
app.command("passes")(passes.passes)
app.command("config")(passes.config)
app.add_typer(cache.app, name="cache")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"inlay {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the verb."""
    settings.debug = debug


def main() -> None:
    """Entry point of the `inlay` command."""
    share_cores()
    app()
