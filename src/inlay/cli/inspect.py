"""`inlay inspect`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from inlay.cli.build import print_pieces, row_bytes
from inlay.cli.console import failing_kindly, out, print_json
from inlay.cli.sizes import bytes_text

if TYPE_CHECKING:
    from inlay.compile.manifest import Manifest

PackageArgument = Annotated[
    Path, typer.Argument(metavar="PACKAGE", help="A folder that `inlay build` wrote.", show_default=False)
]


def inspect(
    package: PackageArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file, weights included.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The manifest, for machines.")] = False,
) -> None:
    """Say what a package is: model, sizes, pieces, state, and what it was built for. Loads no code.

    Example: [bold]inlay inspect ./smollm2 --verify[/]
    """
    with failing_kindly():
        from inlay.compile.load import check, read_manifest

        manifest, folder = read_manifest(package)
        if verify:
            check(manifest, folder, verify=True)
        if as_json:
            print_json(json.loads(manifest.text()))
            return
        _print(manifest, folder, package, verify)


def _print(manifest: Manifest, folder: Path, package: Path, verified: bool) -> None:
    target = manifest.target
    about = Table(box=None, show_header=False, pad_edge=False)
    about.add_column(style="bold")
    about.add_column()
    facts = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in manifest.facts.items())
    code = sum(row.size for name, row in manifest.files.items() if name.endswith(".so"))
    for name, value in (
        ("model", f"{manifest.model} ({manifest.architecture or manifest.kind})"),
        ("facts", facts),
        ("built by", f"Inlay {manifest.inlay}, torch {target.torch}"),
        ("built for", f"{target.machine} with {', '.join(target.cpu_features)}; {target.threads} threads"),
        ("weights", f"{len(manifest.weights)} tensors, {bytes_text(manifest.weights_file.size)}"),
        ("code", bytes_text(code)),
        ("version", folder.name[:16] + (", every file is what it was" if verified else "")),
    ):
        if value:
            about.add_row(name, value)
    out.print(about)
    out.print()
    print_pieces(manifest, package)
    states = Table(box=None, pad_edge=False)
    for column in ("state", "type", "bytes", "how it is known"):
        states.add_column(column, justify="right" if column == "bytes" else "left")
    groups: dict[tuple[str, str], list[str]] = {}
    for row in manifest.states:
        why = next(each.alias.why for each in manifest.bindings.outs if each.alias and each.alias.of == row.name)
        groups.setdefault((row.text, why), []).append(row.target)
    for (text, why), names in groups.items():
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} (× {len(names)})"
        size = next(row_bytes(row) for row in manifest.states if row.target == names[0])
        states.add_row(label, text, f"{size * len(names):,}", why)
    if groups:
        out.print()
        out.print(states, markup=False)
