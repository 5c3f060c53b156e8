"""`inlay lock` and `inlay check`"""

from __future__ import annotations

import difflib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.console import out, print_json
from inlay.cli.model_options import AtOption, DType, DTypeOption, Level, TrustOption, read_program, resolve_config
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import ExitCode, UsageError, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inlay.transforms.lock import LockDifference, LockedModel, LockOptions


def lock(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL…", help="Models, or folders of `inlay watch`, to lock.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Lock file to write.")] = Path("matches.lock"),
    files: ConfigOption = None,
    settings: SetOption = None,
    at: AtOption = Level.CAPTURED,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Record how often every transform matches in a lock file, to check after an upgrade. Prints how the file changed.

    Example: [bold]inlay lock ./my-model -o matches.lock[/]
    """
    from inlay.transforms.lock import Lock, LockOptions, versions

    made = LockOptions.from_files(files or (), settings or (), dtype.value if dtype else "", at.value)
    found = [_lock_entry(model, made, trust) for model in models]
    text = Lock(versions=versions(), options=made, models=found).text()
    before = output.read_text() if output.exists() else ""
    for line in difflib.unified_diff(before.splitlines(), text.splitlines(), "before", str(output), lineterm="", n=1):
        out.print(line, markup=False, soft_wrap=True)
    output.write_text(text)


def check(
    file: Annotated[Path, typer.Option("--lock", help="Lock file to check.")] = Path("matches.lock"),
    files: ConfigOption = None,
    settings: SetOption = None,
    dtype: DTypeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    trust: TrustOption = False,
) -> None:
    """Run the transforms on the models of a lock file and compare the matches.

    Exit code 1: a number of sites or a configuration file differs. Configuration, settings and dtype are taken from the
    lock file unless they are given. On GitHub Actions the differences are printed as annotations of the lock file.

    Example: [bold]inlay check --lock matches.lock[/]
    """
    from inlay.transforms.lock import Comparison, LockOptions, read_lock

    locked = read_lock(file)
    given = LockOptions.from_files(files or (), settings or (), dtype.value if dtype else "")
    given.at = locked.options.at
    made = LockOptions(**{**dict(locked.options), **{name: value for name, value in given if value}})
    seen = Comparison([*locked.changes(), *made.changes()])
    for old in locked.models:
        seen.differences += _compare(old, made, trust)
    if as_json:
        print_json(seen.to_json())
    else:
        for each in seen.differences:
            if os.environ.get("GITHUB_ACTIONS"):
                out.print(each.annotation(file), markup=False, soft_wrap=True)
            else:
                level = "differs" if each.fails else "note"
                out.print(printable(f"{level}: {each.model}: {each.message}"), markup=False, soft_wrap=True)
        if seen.holds:
            out.print(f"{len(locked.models)} models match as locked.")
        else:
            trusted = ["--trust-remote-code"] if trust else []
            words = [*(each.model for each in locked.models), *made.arguments(), *trusted, "-o", str(file)]
            line = printable(f"To accept the changes: inlay lock {shlex.join(words)}")
            out.print(line, markup=False, soft_wrap=True)
    if not seen.holds:
        raise typer.Exit(int(ExitCode.FAILED))


def _lock_entry(model: str, made: LockOptions, trust: bool) -> LockedModel:
    from inlay.watch_startup import is_watch_folder

    if is_watch_folder(model):
        from inlay.insight.watch.folder import lock_passes, read_passes

        return lock_passes(model, read_passes(model))
    return _match_model(model, made, trust)[0]


def _compare(old: LockedModel, made: LockOptions, trust: bool) -> Iterator[LockDifference]:
    from inlay.transforms.lock import compare
    from inlay.watch_startup import is_watch_folder

    if is_watch_folder(old.model):
        from inlay.insight.watch.folder import compare_passes, read_passes

        return compare_passes(old, read_passes(old.model))
    if "::" in old.model:
        raise UsageError(f"{old.model} is a test.", "Run it with pytest: its fixture pattern_lock compares.")
    if not old.program:
        raise UsageError(
            f"{old.model} has no records.", f"Record them: inlay watch -o {shlex.quote(old.model)} -- PROGRAM"
        )
    return compare(old, *_match_model(old.model, made, trust))


def _match_model(model: str, made: LockOptions, trust: bool) -> tuple[LockedModel, Callable[[str], str]]:
    """Return the current matches of a model, and a function that returns the closest near miss of a transform."""
    from inlay.insight import explain
    from inlay.transforms import configure, run
    from inlay.transforms.lock import lock_model

    program = read_program(model, DType(made.dtype) if made.dtype else None, trust, Level(made.at))
    resolved = resolve_config(program, made.files, made.settings)
    # Contracts are not enforced here: a broken contract is reported as a difference.
    steps = configure(resolved)
    for step in steps:
        options = step.transform.options
        step.transform.options = options.model_copy(update={"expect": "any", "reason": "the lock states the count"})
    _, records = run(program, steps)

    def explain_miss(key: str) -> str:
        (explained,) = explain(program, steps, key)
        return explained.findings[0].text if explained.findings else ""

    return lock_model(model, program, resolved, records), explain_miss
