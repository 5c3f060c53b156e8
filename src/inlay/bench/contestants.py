"""Finds the contestants: the package, and the scripts in a folder.

Scripts in `peers/` run in the environment of the peers, those in `own/` in Inlay's environment. A script for several
contestants lists them in `VARIANTS`.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.bench.metrics import INLAY
from inlay.bench.worker import Contestant
from inlay.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inlay.package.manifest import Manifest


def package_contestant(package: Path, manifest: Manifest) -> Contestant:
    """Return the package as a contestant."""
    room = int(manifest.states[0].shape[2])
    arguments = {"package": str(package.resolve()), "threads": manifest.target.threads, "room": room}
    return Contestant(INLAY, Path(__file__).with_name("contestant.py"), Path(sys.executable), arguments)


def find(folder: Path, peers: Path | None, names: Sequence[str] | None, arguments: dict[str, Any]) -> list[Contestant]:
    """Return the named contestants, or all peers if they have an environment."""
    if peers is None and not names:
        return []
    known = {each.name: each for each in _all(folder, peers, arguments)}
    if not known:
        raise UsageError(
            f"{folder} contains no benchmark scripts.",
            "Run in Inlay's repository, or name their folder with --scripts.",
        )
    if names is None:
        return [each for each in known.values() if each.script.parent.name == "peers"]
    chosen = []
    for name in names:
        fitting = [each for each in known.values() if name in (each.name, each.script.stem)]
        if not fitting:
            raise UsageError(
                f"There is no contestant {name}.", suggest(name, known) or f"Available: {', '.join(known)}."
            )
        chosen += fitting
    return list({each.name: each for each in chosen}.values())


def _all(folder: Path, peers: Path | None, arguments: dict[str, Any]) -> Iterator[Contestant]:
    for kind in ("peers", "own"):
        if kind == "peers":
            python = (peers / "bin" / "python") if peers else Path("PEERS/bin/python")
        else:
            python = Path(sys.executable)
        for script in sorted((folder / kind).glob("*.py")):
            for variant in _variants(script):
                name = f"{script.stem}:{variant}" if variant else script.stem
                given = {**arguments, "variant": variant, "peers": str(peers.resolve()) if peers else None}
                yield Contestant(name, script.resolve(), python.absolute(), given)


def _variants(script: Path) -> Sequence[str]:
    """Return the `VARIANTS` of a script, without running it."""
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VARIANTS":
            found: Sequence[str] = ast.literal_eval(node.value)
            return found
    return ("",)
