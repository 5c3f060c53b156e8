"""Answers, piece by piece and whole."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """A stop string came; it is not part of the text."""
    EOS = "eos"
    """The model said it is done."""
    LENGTH = "length"
    """As many tokens as were asked for, or as the package can hold."""
    CANCELLED = "cancelled"
    """Nobody wanted the rest."""
    TIMEOUT = "timeout"
    """It took longer than was allowed."""


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was, and what the likeliest were: natural logarithms, before temperature and cutting off."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenOutput:
    """One token and the text that became certain with it.

    The text is empty while a character or what may be a stop string is incomplete.
    """

    text: str
    token: int
    seconds: float
    """Time spent since the beginning, without the time the reader of the pieces took."""
    finish_reason: FinishReason | None = None
    """Set in the last piece only."""
    logprobs: TokenLogprobs | None = None
    """Where it was asked for."""


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    tokens: tuple[int, ...]
    """All tokens that were drawn, an end token included."""
    finish_reason: FinishReason
    first_token_s: float
    """From the tokens of the prompt to the first token of the answer."""
    tokens_per_second: float | None
    """After the first token; None when there is no second."""

    def summary(self) -> str:
        """How much and how fast, in a line.

        >>> Completion("Hi", (5, 7, 2), FinishReason.EOS, 0.123, 31.24).summary()
        '3 tokens, 31.2 tokens/s, first token after 0.12 s'
        """
        count = f"{len(self.tokens)} token{'s' if len(self.tokens) > 1 else ''}"
        rate = f"{self.tokens_per_second:.1f} tokens/s, " if self.tokens_per_second is not None else ""
        return f"{count}, {rate}first token after {self.first_token_s:.2f} s"


def collect(outputs: Iterable[TokenOutput]) -> Completion:
    """All pieces of an answer in one.

    >>> collect([TokenOutput("Hel", 4, 0.5), TokenOutput("lo", 5, 0.6), TokenOutput("", 2, 0.7, FinishReason.EOS)]).text
    'Hello'
    """
    made = list(outputs)
    finish = made[-1].finish_reason if made else None
    if finish is None:
        raise UsageError("The last piece of this answer is missing.", "Read it to the end before collecting it.")
    first, last = made[0].seconds, made[-1].seconds
    return Completion(
        text="".join(piece.text for piece in made),
        tokens=tuple(piece.token for piece in made),
        finish_reason=finish,
        first_token_s=first,
        tokens_per_second=(len(made) - 1) / (last - first) if last > first else None,
    )
