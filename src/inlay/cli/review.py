"""`inlay review`"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.console import err, print_json, progress
from inlay.cli.model_options import DTypeOption, TrustOption, read_program
from inlay.cli.passes import ConfigOption  # noqa: TC001 - typer reads the annotation
from inlay.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from inlay.transforms.base import Transform

STEPS = {"transforming": 8, "running": 20, "fuzzing": 10}


def review(
    name: Annotated[
        str,
        typer.Argument(
            metavar="TRANSFORM", help="Name of a transform (see `inlay passes`), or its .py file.", show_default=False
        ),
    ],
    models: Annotated[
        list[str], typer.Option("--model", metavar="MODEL", help="Model to review it on. May be given several times.")
    ],
    tests: Annotated[
        list[Path] | None,
        typer.Option("--tests", metavar="FILE", help="Test file of the transform; by default the one in its folder."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder for the review and its files.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="LOCK|PACKAGE", help="Compare with these matches; default: matches.lock."),
    ] = None,
    files: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Review a transform: evaluate the checklist, run its tests on mutants, and write the result as Markdown.

    Exit code 1: an item of the checklist does not hold.

    Example: [bold]inlay review match_swiglu --model ./my-model --model other/model[/]
    """
    from inlay.testing.review import review as evaluate
    from inlay.testing.review.note import render_markdown

    cls = _transform(name)
    labels = [_model_label(model) for model in models]
    if same := [label for label in labels if labels.count(label) > 1]:
        raise UsageError(f"Two models are called {same[0]}.", "Rename one: results are reported by name.")
    programs = {label: read_program(model, dtype, trust) for label, model in zip(labels, models, strict=True)}
    locked = _locked_sites(against)
    place = folder or Path(f"review-{cls.name}")
    with progress(STEPS) as step:
        done = evaluate(
            cls, programs, tests=tests or (), config=files or (), folder=place, expected_sites=locked, on_step=step
        )
    text = render_markdown(done)
    (place / "review.md").write_text(text)
    if as_json:
        print_json(done.to_json())
    else:
        typer.echo(text, nl=False)
    err.print(f"Saved in {place}", markup=False, soft_wrap=True)
    if not done.passed:
        raise typer.Exit(int(ExitCode.FAILED))


def _model_label(model: str) -> str:
    """Return the label of a model in a review; for a file or folder, its last path component."""
    return Path(model).name if Path(model).exists() else model


def _locked_sites(against: Path | None) -> dict[str, dict[str, int]]:
    """Return the sites of a lock or package by model and transform; by default of matches.lock, if there is one."""
    from inlay.transforms.lock import read_lock

    path = against or Path("matches.lock")
    if against is None and not path.exists():
        return {}
    read = read_lock(path / "current" / "matches.lock" if path.is_dir() else path)
    return {_model_label(each.model): {key: row.sites for key, row in each.transforms.items()} for each in read.models}


def _transform(name: str) -> type[Transform]:
    """Return a registered transform, or the one that a file registers."""
    from inlay.transforms import registry
    from inlay.transforms.base import find_transform

    file = Path(name)
    if file.suffix != ".py":
        return find_transform(name)
    if not file.is_file():
        raise UsageError(f"There is no file {name}.", "Name a transform, or its file.")
    known = set(registry())
    installed = [cls for cls in registry().values() if Path(inspect.getfile(cls)).resolve() == file.resolve()]
    if len(installed) == 1:
        return installed[0]
    sys.path.insert(0, str(file.parent.resolve()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # the tests import it by this name
    spec.loader.exec_module(module)
    new = [cls for key, cls in registry().items() if key not in known]
    if len(new) != 1:
        raise UsageError(f"{name} registers {len(new)} transforms; expected 1.", "Name a file that registers one.")
    return new[0]
