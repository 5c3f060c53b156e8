"""`inlay build`"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import model_options as options
from inlay.cli.cache import print_lookup
from inlay.cli.console import make_table, out, print_json, progress
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import UsageError
from inlay.sizes import format_bytes

if TYPE_CHECKING:
    from inlay.flow import BuildResult
    from inlay.package.manifest import Manifest


def build(
    model: options.BuildModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write the package to.", show_default=False)],
    max_length: options.BuildMaxLengthOption = None,
    max_batch: options.BuildMaxBatchOption = None,
    buckets: Annotated[
        list[str] | None,
        typer.Option(
            "--buckets",
            metavar="SIZES",
            help="Sizes to compile separately, such as length=1 (the default for a decoder) or"
            " batch=1,length=2..64. May be given several times. none: compile once for all sizes.",
        ),
    ] = None,
    weights: options.WeightsOption = None,
    kernels: Annotated[
        options.CodeTarget, typer.Option("--kernels", help="native: for this processor. portable: for any with AVX2.")
    ] = options.CodeTarget.NATIVE,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="OUTPUT=INPUT", help="Declare that OUTPUT shares the storage of INPUT."),
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option("--dump", help="Folder for a dump after each transform; default: INLAY_DUMP_GRAPHS_DIR."),
    ] = None,
    files: ConfigOption = None,
    settings: SetOption = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither read nor write the build cache.")] = False,
    explain_cache: Annotated[
        bool, typer.Option("--explain-cache", help="Report the cache hit, or the factors that changed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    trust: options.TrustOption = False,
) -> None:
    """Compile a model into a package: a folder that loads fast and needs no compiler.

    Example: [bold]inlay build SmolLM2-135M-Instruct.Q4_1.gguf -o ./smollm2 --max-length 2048[/]

    Example: [bold]inlay build ./my-model -o ./package --weights int4 --max-batch 16[/]

    Example: [bold]inlay build ./my-model -o ./package --explain-cache[/]
    """
    from inlay.flow import BuildOptions, build

    asked = BuildOptions(
        max_length=max_length or options.MAX_LENGTH,
        max_batch=max_batch or options.MAX_BATCH,
        buckets=_buckets(buckets),
        weights=weights.value if weights else "",
        kernels=kernels.value,
        config=tuple(files or ()),
        settings=tuple(settings or ()),
        alias=_aliases(alias or ()),
        dump=dump,
        trust_remote_code=trust,
        use_cache=not no_cache,
    )
    with progress(options.BUILD_STEPS) as step:
        made = build(model, output, asked, on_step=step)
    if as_json:
        print_json(_as_json(made))
    else:
        _print(made)
        print_lookup(made.cache, explain_cache)


def _buckets(given: list[str] | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(each for each in given if each != "none")


def _aliases(given: tuple[str, ...] | list[str]) -> dict[str | int, str | int]:
    found: dict[str | int, str | int] = {}
    for text in given:
        output, equals, source = text.partition("=")
        if not equals:
            raise UsageError(f"{text!r} is not an alias.", "Write --alias OUTPUT=INPUT.")
        found[int(output) if output.isdigit() else output] = int(source) if source.isdigit() else source
    return found


def _as_json(made: BuildResult) -> dict[str, Any]:
    manifest = made.manifest
    return {
        "package": str(made.path),
        "model": manifest.model,
        "kind": manifest.kind,
        "left_out": list(made.left_out),
        "transforms": [record.to_json() for record in made.records],
        "pieces": [
            {
                "bucket": bucket.name,
                "piece": piece.name,
                "steps": sum(step.piece == piece.name for step in bucket.steps),
            }
            for bucket in manifest.buckets
            for piece in bucket.pieces
        ],
        "weights_bytes": manifest.weights_file.size,
        "code_bytes": sum(row.size for name, row in manifest.files.items() if name.endswith(".so")),
        "seconds": {name: round(value, 2) for name, value in made.seconds.items()},
        "cache": made.cache.to_json(),
    }


def _print(made: BuildResult) -> None:
    manifest = made.manifest
    table = make_table("transform", "sites", "missed", right=("sites", "missed"))
    for record in made.records:
        if record.status == "ran" and (record.sites or record.misses):
            table.add_row(record.key, str(record.sites), str(len(record.misses) or ""))
    out.print(table)
    for remark in (each for record in made.records for each in record.notes):
        out.print(remark.reason, markup=False, highlight=False)
    if made.left_out:
        out.print(f"Left out: {', '.join(made.left_out)}.", markup=False, highlight=False)
    out.print()
    print_pieces(manifest)
    total = sum(made.seconds.values())
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in made.seconds.items())
    out.print(f"\nBuilt {made.path} in {total:.0f} s ({parts}).")
    state = sum(row.nbytes for row in manifest.states)
    out.print(f"{format_bytes(manifest.weights_file.size)} of weights, {format_bytes(state)} of state per session.")
    commands = {"decoder": "run", "encoder": "embed"}
    if manifest.kind in commands:
        out.print(f'Try: inlay {commands[manifest.kind]} {made.path} "Once upon a time"', markup=False)


def print_pieces(manifest: Manifest) -> None:
    """Print a table of all pieces: how often each runs, its kind and its size."""
    table = make_table("sizes", "piece", "steps", "kind", "size", right=("steps", "size"))
    for bucket in manifest.buckets:
        for piece in bucket.pieces:
            steps = sum(step.piece == piece.name for step in bucket.steps)
            what = "compiled" if piece.file.endswith(".so") else "eager"
            table.add_row(bucket.text, piece.name, f"× {steps}", what, format_bytes(manifest.files[piece.file].size))
    out.print(table)
