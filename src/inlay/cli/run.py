"""`inlay run`"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import model_options as options
from inlay.cli.console import err, print_json
from inlay.cli.passes import SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inlay.runtime import Completion, TokenOutput
    from inlay.runtime.chat_template import Messages


def run(
    target: options.PackageOrModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt.", show_default=False)],
    system: Annotated[
        str | None, typer.Option("--system", help="System message; the model needs a chat template.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Maximum number of tokens to generate.")] = 256,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="Stop before this text; can be given several times."),
    ] = None,
    temperature: options.TemperatureOption = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from the K most likely tokens; 0: from all.")] = 0,
    top_p: options.TopPOption = 1.0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Exclude tokens below this fraction of the highest probability.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Values above 1 make repeated tokens less likely.")
    ] = 1.0,
    seed: options.SeedOption = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print tokens as they are generated.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON; not streamed.")] = False,
    max_length: options.MaxLengthOption = None,
    max_batch: options.MaxBatchOption = None,
    weights: options.WeightsOption = None,
    settings: SetOption = None,
    trust: options.TrustOption = False,
) -> None:
    """Answer a prompt with a model or a compiled package.

    The text is written to standard output; the speed to standard error. A model is built first and kept in the package
    cache (`inlay cache ls`), so later starts take a few seconds. --top-k, --top-p, --min-p and --seed need a
    --temperature above 0.

    Example: [bold]inlay run model.gguf "Name the capital of France."[/]

    Example: [bold]inlay run ./package "Once upon a time" --raw --temperature 0.8 --top-p 0.95 --seed 1[/]
    """
    if temperature == 0 and (top_k or top_p != 1 or min_p or seed is not None):
        raise UsageError(
            "Sampling options (--top-k, --top-p, --min-p, --seed) have no effect at temperature 0.",
            "Add --temperature 0.7, or remove them.",
        )
    if raw and system is not None:
        raise UsageError("--system needs the chat template, which --raw disables.", "Remove one of them.")
    import inlay
    from inlay.runtime.outputs import collect

    sampling = inlay.Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    asked: str | Messages = prompt
    if system is not None:
        asked = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    model = inlay.load(options.ensure_package(target, max_length, max_batch, weights, settings, trust))
    pieces = model.generate(asked, sampling=sampling, max_tokens=max_tokens, stop=stop or (), raw=raw, stream=True)
    if as_json:
        made = collect(pieces)
        print_json(asdict(made))
    elif stream:
        made = _print_stream(pieces)
    else:
        made = collect(pieces)
        typer.echo(made.text)
    err.print(made.summary(), markup=False)


def _print_stream(pieces: Iterable[TokenOutput]) -> Completion:
    from inlay.runtime.outputs import collect

    made = []
    for piece in pieces:
        made.append(piece)
        sys.stdout.write(piece.text)
        sys.stdout.flush()
    typer.echo()
    return collect(made)
