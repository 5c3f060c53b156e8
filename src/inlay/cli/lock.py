"""`inlay lock` and `inlay check`"""

from __future__ import annotations

import difflib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.console import error_boundary, out, print_json
from inlay.cli.model_options import AtOption, DType, DTypeOption, Level, TrustOption, read_program, resolve_config
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.program.program import Program
    from inlay.transforms.lock import LockDifference, LockedModel, LockOptions
    from inlay.transforms.pass_manager import TransformStep


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
    with error_boundary():
        from inlay.transforms.lock import Lock, LockOptions, versions

        made = LockOptions.from_files(files or (), settings or (), dtype.value if dtype else "", at.value)
        found = [_lock_entry(model, made, trust) for model in models]
        text = Lock(versions=versions(), options=made, models=found).text()
        before = output.read_text() if output.exists() else ""
        for line in difflib.unified_diff(
            before.splitlines(), text.splitlines(), "before", str(output), lineterm="", n=1
        ):
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
    with error_boundary():
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
                    out.print(
                        f"{'differs' if each.fails else 'note'}: {each.model}: {each.message}",
                        markup=False,
                        soft_wrap=True,
                    )
            if seen.holds:
                out.print(f"{len(locked.models)} models match as locked.")
            else:
                trusted = ["--trust-remote-code"] if trust else []
                words = [*(each.model for each in locked.models), *made.arguments(), *trusted, "-o", str(file)]
                out.print(f"To accept the changes: inlay lock {shlex.join(words)}", markup=False, soft_wrap=True)
        if not seen.holds:
            raise typer.Exit(int(ExitCode.FAILED))


@dataclass(frozen=True)
class _MatchedModel:
    """A model with its current matches."""

    lock_entry: LockedModel
    program: Program
    steps: list[TransformStep]

    def explain_miss(self, key: str) -> str:
        """Return why a transform does not match at its closest near miss."""
        from inlay.insight import explain

        (explained,) = explain(self.program, self.steps, key)
        return explained.findings[0].text if explained.findings else ""


def _lock_entry(model: str, made: LockOptions, trust: bool) -> LockedModel:
    from inlay.insight.watch.folder import is_watch_folder, lock_folder

    return lock_folder(model) if is_watch_folder(model) else _match_model(model, made, trust).lock_entry


def _compare(old: LockedModel, made: LockOptions, trust: bool) -> Iterator[LockDifference]:
    from inlay.insight.watch.folder import explain_watched, is_watch_folder, lock_folder
    from inlay.transforms.lock import compare

    if is_watch_folder(old.model):
        return compare(old, lock_folder(old.model), lambda key: explain_watched(old.model, key))
    new = _match_model(old.model, made, trust)
    return compare(old, new.lock_entry, new.explain_miss)


def _match_model(model: str, made: LockOptions, trust: bool) -> _MatchedModel:
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
    return _MatchedModel(lock_model(model, program, resolved, records), program, steps)
