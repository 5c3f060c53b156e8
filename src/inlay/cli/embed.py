"""`inlay embed`"""

from __future__ import annotations

import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from inlay.cli import model_options as options
from inlay.cli.console import print_json, progress_count
from inlay.errors import UsageError, one_line


def embed(
    target: options.PackageOrModelArgument,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="The texts.", show_default=False)] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="File with one text per line; -: standard input.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="NAME", help="Prompt of the model to put in front of every text.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Maximum texts that are computed at once.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
) -> None:
    """Print the embeddings of texts, one per line, with a text encoder or its compiled package.

    A model is built first and kept in the package cache (`inlay cache ls`).

    Example: [bold]inlay embed ./package "Paris is a city." "A fox jumps."[/]

    Example: [bold]inlay embed ./package --file texts.txt --json > embeddings.json[/]
    """
    given = [*(texts or ()), *(_read_lines(file) if file else ())]
    if not given and not file:
        raise UsageError("There is no text.", "Pass texts, or --file FILE.")
    import inlay

    encoder = inlay.load_encoder(options.ensure_package(target))
    with progress_count("embedding", len(given)) as show:
        made = encoder.embed(given, prompt=prompt, batch_size=batch, on_progress=show).tolist()
    if as_json:
        rows = [{"text": text, "embedding": row} for text, row in zip(given, made, strict=True)]
        print_json({"dimension": encoder.dimension, "embeddings": rows})
        return
    for row in made:
        typer.echo(" ".join(f"{value:.9g}" for value in row))


def _read_lines(file: str) -> list[str]:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return [line.removesuffix("\n") for line in TextIOWrapper(BytesIO(content), "utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The texts in {file} cannot be read: {one_line(error)}.", "Pass a file in UTF-8.") from error
