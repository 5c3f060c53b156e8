"""`inlay inspect`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from inlay.cli.build import print_pieces
from inlay.cli.console import make_table, out, print_json
from inlay.sizes import format_bytes

if TYPE_CHECKING:
    from inlay.package.manifest import Manifest
    from inlay.program.bindings import Binding
    from inlay.program.encoder import EncoderFacts

PackageArgument = Annotated[
    Path, typer.Argument(metavar="PACKAGE", help="Folder that `inlay build` wrote.", show_default=False)
]


def inspect(
    package: PackageArgument,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check torch version, machine, CPU and the hash of every file.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Output the manifest as JSON.")] = False,
) -> None:
    """Describe a package: model, sizes, pieces, state and target machine. Loads no code.

    Example: [bold]inlay inspect ./smollm2 --verify[/]
    """
    from inlay.package.loader import check_package, read_manifest

    manifest, folder = read_manifest(package)
    if verify:
        check_package(manifest, folder, verify=True)
    if as_json:
        print_json(json.loads(manifest.text()))
        return
    _print(manifest, folder, verify)


def _print(manifest: Manifest, folder: Path, verified: bool) -> None:
    target = manifest.target
    about = Table(box=None, show_header=False, pad_edge=False)
    about.add_column(style="bold")
    about.add_column()
    facts = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in manifest.facts.items())
    code = sum(row.size for name, row in manifest.files.items() if name.endswith(".so"))
    for name, value in (
        ("model", f"{manifest.model} ({manifest.architecture or manifest.kind})"),
        ("facts", facts),
        ("embeddings", _describe_encoder(manifest.encoder)),
        ("built by", f"Inlay {manifest.inlay}, torch {target.torch}"),
        ("built for", f"{target.machine} with {', '.join(target.cpu_features)}; {target.threads} threads"),
        ("weights", f"{len(manifest.weights)} tensors, {format_bytes(manifest.weights_file.size)}"),
        ("code", format_bytes(code)),
        ("version", folder.name[:16] + (", all hashes match" if verified else "")),
    ):
        if value:
            about.add_row(name, value)
    out.print(about)
    out.print()
    print_pieces(manifest)
    _print_kernels(manifest)
    states = make_table("state", "type", "bytes", "how detected", right=("bytes",))
    groups: dict[tuple[str, str], list[Binding]] = {}
    for row in manifest.states:
        groups.setdefault((row.type_text, manifest.bindings.find_alias(row.name).kind), []).append(row)
    for (text, why), rows in groups.items():
        first, last = rows[0].target, rows[-1].target
        label = first if len(rows) == 1 else f"{first} … {last} (× {len(rows)})"
        states.add_row(label, text, f"{sum(row.nbytes for row in rows):,}", why)
    if groups:
        out.print()
        out.print(states, markup=False)


def _describe_encoder(facts: EncoderFacts | None) -> str:
    if facts is None:
        return ""
    prompts = f", prompts {', '.join(facts.prompts)}" if facts.prompts else ""
    normalized = ", normalized" if facts.normalized else ""
    return f"up to {facts.max_length:,} tokens, {' and '.join(facts.pooling)} pooling{normalized}{prompts}"


def _print_kernels(manifest: Manifest) -> None:
    """Print the kernel chosen for each packed linear layer and row count, with the measured times."""
    from inlay.lowering.buckets import measured_kernels

    rows = {
        (name, f"{features} × {depth}", str(bits)): row
        for (name, features, depth, bits), row in measured_kernels(manifest.buckets).items()
    }
    if not rows:
        return
    columns = "bucket", "linear layer", "bits", "rows", "kernel", "µs", "others"
    table = make_table(*columns, right=("bits", "rows", "µs"))
    for label, row in rows.items():
        for place, count in enumerate(sorted(map(int, row.timings))):
            took, chosen = row.timings[str(count)], row.variant(count)
            others = ", ".join(f"{other} {value:g}" for other, value in took.items() if other != chosen)
            table.add_row(*(label if not place else ("", "", "")), str(count), chosen, f"{took[chosen]:g}", others)
    out.print()
    out.print(table)
