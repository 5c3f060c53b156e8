"""`inlay chat`"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import model_options as options
from inlay.cli.console import err
from inlay.cli.passes import SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import InlayError, UsageError

if TYPE_CHECKING:
    from inlay.runtime.engine import Engine
    from inlay.runtime.outputs import TokenOutput
    from inlay.runtime.request import RequestHandle
    from inlay.runtime.sampling import Sampling

_HELP = "/clear starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def chat(
    target: options.PackageOrModelArgument,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Maximum number of tokens per answer.")] = 1024,
    temperature: options.TemperatureOption = 0.7,
    top_p: options.TopPOption = 0.95,
    seed: options.SeedOption = None,
    max_length: options.MaxLengthOption = None,
    max_batch: options.MaxBatchOption = None,
    weights: options.WeightsOption = None,
    settings: SetOption = None,
    trust: options.TrustOption = False,
) -> None:
    """Chat with a model in the terminal.

    /clear starts a new conversation. /exit or Ctrl-D ends. Ctrl-C stops an answer.

    Example: [bold]inlay chat model.gguf --system "Answer in one sentence."[/]
    """
    from inlay.runtime.engine import Engine
    from inlay.runtime.sampling import Sampling
    from inlay.runtime.settings import EngineSettings

    sampling = Sampling(temperature, top_p=top_p if temperature else 1.0, seed=seed)
    package = options.ensure_package(target, max_length, max_batch, weights, settings, trust)
    engine = Engine.open(package, EngineSettings(slots=1))
    if engine.text.chat is None:
        raise UsageError(f"{target} has no chat template.", f'Use `inlay run {target} "…" --raw`.')
    engine.start()
    try:
        _converse(engine, system, sampling, max_tokens)
    finally:
        engine.close()


def _converse(engine: Engine, system: str | None, sampling: Sampling, max_tokens: int) -> None:
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives `input` line editing and history

        err.print(_HELP, style="dim")
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            err.print()
            return
        if said in ("/exit", "/quit"):
            return
        if said == "/clear":
            messages = list(start)
        elif said.startswith("/"):
            err.print(_HELP, style="dim")
        elif said:
            messages.append({"role": "user", "content": said})
            try:
                messages.append({"role": "assistant", "content": _answer(engine, messages, sampling, max_tokens)})
            except InlayError as error:
                messages.pop()
                err.print(f"error: {error} /clear starts a new conversation.", style="red", markup=False)


def _answer(engine: Engine, messages: list[dict[str, str]], sampling: Sampling, max_tokens: int) -> str:
    """Print the answer to a conversation as it is generated, and return it."""
    from inlay.runtime.request import Request

    handle: RequestHandle | None = None
    pieces: list[TokenOutput] = []
    while True:
        try:
            handle = handle or engine.submit(Request(tuple(engine.text.encode_chat(messages)), sampling, max_tokens))
            for piece in handle:
                pieces.append(piece)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            break
        except KeyboardInterrupt:
            if handle is None:
                break
            handle.cancel()
    sys.stdout.write("\n")
    return "".join(piece.text for piece in pieces)
