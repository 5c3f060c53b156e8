"""`inlay report`"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.console import err, progress
from inlay.cli.model_options import AtOption, DTypeOption, Level, TrustOption, read_program
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import UsageError, one_line
from inlay.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

_STEPS = {"transforming": 1, "lowering": 3, "searching": 4}


def report(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|FOLDER", help="A model (see `inlay show`), or a folder of `inlay build` or `inlay watch`."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file to write.")] = Path("report.html"),
    drift: Annotated[
        bool, typer.Option("--drift", help="Also measure numerical drift of every transform, as `inlay verify`.")
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Also show this timeline.json, written by `inlay streams -o`.")
    ] = None,
    lock: Annotated[
        Path | None, typer.Option("--lock", help="Also compare what was watched with this lock file.")
    ] = None,
    max_length: Annotated[int, typer.Option("--max-length", min=1, help="Maximum tokens per sequence.")] = 2048,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Maximum sequences per batch.")] = 8,
    files: ConfigOption = None,
    settings: SetOption = None,
    at: AtOption = Level.CAPTURED,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Write an HTML report about a model or package: matches and misses of every transform, plan, memory, settings.

    The page opens from disk in any browser, without a server or network access.

    Example: [bold]inlay report SmolLM2-135M-Instruct.Q4_1.gguf -o report.html[/]

    Example: [bold]inlay report ./package -o report.html[/]

    Example: [bold]inlay report watched --lock passes.lock -o passes.html[/]
    """
    from inlay.package.store import is_package
    from inlay.watch_startup import is_watch_folder

    lanes = {} if timeline is None else {"lanes": _timeline_section(timeline)}
    if is_watch_folder(model):
        from inlay.insight.report.comparison import build_watched_page

        made = build_watched_page(model, lock)
    elif lock is not None:
        raise UsageError(f"{model} is not a folder of `inlay watch`.", "Omit --lock; `inlay check` takes models.")
    elif is_package(Path(model)):
        from inlay.insight.report import report_package

        made = report_package(Path(model))
    else:
        made = _report_model(model, drift, max_length, max_batch, (files, settings), (dtype, trust, at))
    write_report(made | lanes, output)


def _timeline_section(file: Path) -> dict[str, Any]:
    from inlay.streams.timeline import Timeline
    from inlay.streams.timeline_svg import section

    try:
        return section(Timeline.from_json(file.read_bytes()))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {one_line(error)}.", "Name a saved timeline.json.") from error


def _report_model(
    model: str,
    drift: bool,
    max_length: int,
    max_batch: int,
    configured: tuple[Any, Any],
    captured: tuple[Any, ...],
) -> dict[str, Any]:
    start = time.perf_counter()
    program = read_program(model, *captured)
    spent = {"capture": time.perf_counter() - start}
    files, settings = configured
    with progress(_STEPS | ({"verifying": 40} if drift else {})) as step:
        from inlay.flow import BuildOptions
        from inlay.insight.report import report_program

        options = BuildOptions(
            max_length=max_length, max_batch=max_batch, config=tuple(files or ()), settings=tuple(settings or ())
        )
        return report_program(program, options, drift=drift, seconds=spent, on_step=step)


def write_report(facts: Mapping[str, Any], output: Path) -> None:
    """Write a page and print its path and size."""
    from inlay.insight.report import write_page

    size = write_page(facts, output)
    err.print(f"wrote {output}, {format_bytes(size)}; open it in a browser", markup=False, soft_wrap=True)
