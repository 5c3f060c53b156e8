"""`inlay refit`"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import typer

from inlay.cli.console import out, progress
from inlay.cli.inspect import PackageArgument  # noqa: TC001 - typer reads the annotation
from inlay.sizes import format_bytes


def refit(
    package: PackageArgument,
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            metavar="MODEL",
            help="Model whose weights to use: Hugging Face folder or GGUF file (not a format).",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a new package here instead of changing PACKAGE.")
    ] = None,
) -> None:
    """Replace the weights of a package by those of another checkpoint of the same model. Compiles nothing.

    Example: [bold]inlay refit ./package --weights ./my-finetuned-model[/]
    """
    from inlay.package.refit import refit

    with progress({"opening": 4, "writing": 4}) as step:
        made = refit(package, weights, output=output, on_step=step)
    out.print(f"{output or package} now contains {made.model}: {format_bytes(made.weights_file.size)} of weights.")
