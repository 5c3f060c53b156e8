"""`inlay explain`"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from inlay import derived_cache
from inlay.cli.console import out, print_json
from inlay.cli.model_options import AtOption, DTypeOption, Level, ModelArgument, TrustOption, read_program
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.cli.show_pass import steps_up_to
from inlay.watch_startup import is_watch_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.cli.model_options import DType

_MOST = 5


def explain(
    model: ModelArgument,
    pass_name: Annotated[
        str | None, typer.Option("--pass", metavar="NAME", help="Explain only this transform, with all its remarks.")
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also print trivial misses: one node, or under half.")
    ] = False,
    files: ConfigOption = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    at: AtOption = Level.CAPTURED,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Explain why transforms did not match: near misses, what differs there, and in which layers.

    First come the transforms that matched nothing and have near misses. An explanation is kept until Inlay, the model
    or a library changes; only Inlay's own transforms and models in local files have this.

    Example: [bold]inlay explain ./SmolLM2-135M[/]

    Example: [bold]inlay explain MODEL --pass match_rms_norm --json[/]
    """
    if Path(model).is_dir() and _print_watched(model, pass_name, show_all, as_json):
        return
    asked = _Question(model, pass_name, files or [], settings or [], dtype, trust, at)
    name = _stored_name(asked)
    explained = derived_cache.read(name) if name else None
    if explained is None and name and pass_name:  # it may be a part of the explanation of all transforms
        of_all = derived_cache.read(_stored_name(replace(asked, pass_name=None))) or []
        explained = [each for each in of_all if each["transform"] == pass_name and each["status"] == "ran"] or None
    if explained is None:
        explained, is_own = _compute(asked)
        if name and is_own and _stored_name(asked) == name:
            derived_cache.write(name, explained)
    if as_json:
        print_json(explained)
        return
    near = sum(len(finding["roots"]) for each in explained for finding in _near_misses(each))
    hidden = sum(len(finding["roots"]) for each in explained for finding in each["findings"]) - near
    shown = "shown" if show_all else "hidden, --all shows them"
    trivial = f"; {hidden} trivial ones {shown}" if hidden else ""
    if pass_name is None or hidden:
        out.print(f"{near} near miss{'' if near == 1 else 'es'}{trivial}.", highlight=False)
    for each in sorted(explained, key=lambda each: (bool(each["matches"]), not _near_misses(each))):
        _print(each, show_all, most=None if pass_name is not None else _MOST)
    silent = [each for each in explained if not _near_misses(each) and not each["matches"]]
    if ran := [each["transform"] for each in silent if each["status"] == "ran"]:
        out.print(Text(f"No match and no near miss: {', '.join(ran)}.", style="dim"))
    if skipped := [f"{each['transform']} ({each['skip_reason']})" for each in silent if each["status"] == "skipped"]:
        out.print(Text(f"Skipped: {', '.join(skipped)}.", style="dim"))


def _print_watched(folder: str, pass_name: str | None, show_all: bool, as_json: bool) -> bool:
    """Print what was watched, if MODEL is such a folder."""
    if not is_watch_folder(folder):
        return False
    from inlay.cli.watch import print_passes
    from inlay.errors import UsageError, suggest
    from inlay.insight.watch.folder import read_passes

    passes = read_passes(folder)
    if pass_name is not None and pass_name not in passes:
        raise UsageError(f"No pass {pass_name} was watched.", suggest(pass_name, passes) or "Omit --pass to see all.")
    shown = [each for each in passes.values() if pass_name in (None, each.name)]
    if as_json:
        print_json([each.to_json() for each in shown])
    else:
        print_passes(shown, show_all or pass_name is not None, pass_name is not None)
    return True


@dataclass(frozen=True)
class _Question:
    """The model and options that an explanation depends on."""

    model: str
    pass_name: str | None
    config: Sequence[Path]
    settings: Sequence[str]
    dtype: DType | None
    trust: bool
    at: Level


def _stored_name(asked: _Question) -> str:
    """Return the name of the explanation in the derived cache; empty if it may depend on code of others."""
    if asked.trust or (asked.pass_name and ":" in asked.pass_name) or entry_points(group="inlay.transforms"):
        return ""
    from inlay.package_cache import compute_key

    key = compute_key(asked.model, {**vars(asked), "model": ""})  # the key contains its resolved path
    return f"explain-{hashlib.sha256(json.dumps(key).encode()).hexdigest()}" if key["files"] else ""


def _compute(asked: _Question) -> tuple[list[dict[str, Any]], bool]:
    """Return the explanations as JSON data, and whether all transforms are Inlay's own."""
    from inlay.insight import explain

    options = asked.pass_name, asked.config, asked.settings
    steps_up_to(*options)  # report mistakes before the model is captured
    program = read_program(asked.model, asked.dtype, asked.trust, asked.at)
    steps = steps_up_to(*options, model=program.name, architecture=program.facts.architecture)
    explained = explain(program, steps, steps[-1].key if asked.pass_name is not None else "")
    is_own = all(type(step.transform).__module__.startswith("inlay.") for step in steps)
    return [each.to_json() for each in explained], is_own


def _near_misses(explained: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in explained["findings"] if not finding["trivial"]]


def _print(explained: dict[str, Any], show_all: bool, most: int | None) -> None:
    """Print the number of matches, then the near misses, closest first."""
    findings = explained["findings"] if show_all else _near_misses(explained)
    if not explained["matches"] and not findings:
        return
    matched = f"matched {explained['matches']}" if explained["matches"] else "matched nothing"
    out.print(Text.assemble((explained["transform"], "bold"), f"  {matched}"))
    for finding in findings[:most]:
        out.print(Padding(Text(finding["text"]), (0, 0, 0, 2)))
        if finding["suggestion"]:
            out.print(Padding(Text(finding["suggestion"], style="dim"), (0, 0, 0, 4)))
    if most is not None and len(findings) > most:
        out.print(Padding(Text(f"… and {len(findings) - most} more (--pass {explained['transform']})"), (0, 0, 0, 2)))
