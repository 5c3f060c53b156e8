"""From a prompt to text: one token at a time, until an end token, a stop string, or no room."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from inlay.runtime.pieces import Piece
from inlay.runtime.request import Request
from inlay.runtime.writing import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inlay.runtime.protocol import Stepper
    from inlay.runtime.sampling import Sampling
    from inlay.runtime.text import Text


def generate(
    stepper: Stepper,
    text: Text,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    stop: Sequence[str] = (),
) -> Iterator[Piece]:
    """Pieces of the answer to a prompt of tokens, which `Text.encode` and `Text.encode_chat` make.

    The tokens after the first are timed without what happens between two pieces.
    """
    started, aside = perf_counter(), 0.0
    writer = Writer(Request(tuple(prompt), sampling, max_tokens, stop), text, stepper.room)
    given = list(prompt)
    stepper.restart()
    while True:
        token = writer.draw(stepper.advance(given))
        given = [token]
        shown, ended = writer.add(token)
        paused = perf_counter()
        yield Piece(shown, token, paused - started - aside, ended)
        if ended:
            return
        aside += perf_counter() - paused
