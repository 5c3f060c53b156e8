"""`inlay run`"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.console import err, error_boundary, print_json
from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inlay.runtime import Completion, TokenOutput
    from inlay.runtime.chat_template import Messages


def run(
    package: Annotated[
        str, typer.Argument(metavar="PACKAGE", help="A folder that `inlay build` wrote.", show_default=False)
    ],
    prompt: Annotated[str, typer.Argument(help="What to answer, or with --raw to continue.", show_default=False)],
    system: Annotated[
        str | None, typer.Option("--system", help="What the model is told before the prompt; needs a chat template.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it stands: no chat template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="The most tokens to make.")] = 256,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw among the K likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw among the likeliest that make up this share.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", help="Leave out tokens below this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="More than 1 discourages tokens already seen.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Draw the same each time.")] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is made.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON; not streamed.")] = False,
) -> None:
    """Answer a prompt with a compiled package.

    The text goes to standard output; how fast it was is the last line on standard error.

    Example: [bold]inlay run ./package "Name the capital of France."[/]

    Example: [bold]inlay run ./package "Once upon a time" --raw --temperature 0.8 --top-p 0.95 --seed 1[/]
    """
    with error_boundary():
        if temperature == 0 and (top_k or top_p != 1 or min_p or seed is not None):
            raise UsageError(
                "Sampling options (--top-k, --top-p, --min-p, --seed) have no effect at temperature 0.",
                "Add --temperature 0.7, or leave them out.",
            )
        if raw and system is not None:
            raise UsageError("--system needs the chat template, which --raw leaves out.", "Leave one of them out.")
        import inlay
        from inlay.runtime.outputs import collect

        sampling = inlay.Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        asked: str | Messages = prompt
        if system is not None:
            asked = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        model = inlay.load(package)
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
