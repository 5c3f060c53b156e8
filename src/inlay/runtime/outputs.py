"""Outputs of a generation: single tokens and whole completions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop string was generated, which is not part of the text, or all that the grammar of the request asks for."""
    EOS = "eos"
    """The model generated an end token."""
    LENGTH = "length"
    """max_tokens or the capacity of the package was reached."""
    CANCELLED = "cancelled"
    """The request was cancelled."""
    TIMEOUT = "timeout"
    """The timeout of the request expired."""


@dataclass(frozen=True)
class TokenLogprobs:
    """The logprob of a token and the top logprobs, before penalties, temperature, top-k, top-p and min-p."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenOutput:
    """One generated token and the text that became final with it.

    The text is empty while a character is incomplete, or while the text may be the beginning of a stop string.
    """

    text: str
    token: int
    """Not a new token in the last output of a request that was cancelled or timed out."""
    seconds: float
    """Seconds since the start of the request, without the time spent by the consumer of the outputs."""
    finish_reason: FinishReason | None = None
    """Set in the last output only."""
    logprobs: TokenLogprobs | None = None
    """Set if the request asks for logprobs."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of all tokens of the prompt but the first. Set in the first output if the request asks for them."""


@dataclass(frozen=True)
class Completion:
    """A finished generation."""

    text: str
    tokens: tuple[int, ...]
    """All generated tokens, including an end token."""
    finish_reason: FinishReason
    first_token_s: float
    """Seconds from the tokenized prompt to the first generated token."""
    tokens_per_second: float | None
    """Rate after the first token; None if there is no second token."""

    def summary(self) -> str:
        """Return token count, rate and time to first token in one line.

        >>> Completion("Hi", (5, 7, 2), FinishReason.EOS, 0.123, 31.24).summary()
        '3 tokens, 31.2 tokens/s, first token after 0.12 s'
        """
        count = f"{len(self.tokens)} token{'s' if len(self.tokens) > 1 else ''}"
        rate = f"{self.tokens_per_second:.1f} tokens/s, " if self.tokens_per_second is not None else ""
        return f"{count}, {rate}first token after {self.first_token_s:.2f} s"


def collect(outputs: Iterable[TokenOutput]) -> Completion:
    """Join the outputs of a generation into a completion.

    >>> collect([TokenOutput("Hel", 4, 0.5), TokenOutput("lo", 5, 0.6), TokenOutput("", 2, 0.7, FinishReason.EOS)]).text
    'Hello'
    """
    made = list(outputs)
    finish = made[-1].finish_reason if made else None
    if finish is None:
        raise UsageError("The last output of this generation is missing.", "Read all outputs before collecting them.")
    is_aborted = finish in (FinishReason.CANCELLED, FinishReason.TIMEOUT)
    tokens = tuple(piece.token for piece in (made[:-1] if is_aborted else made))
    first, last = made[0].seconds, made[-1].seconds
    return Completion(
        text="".join(piece.text for piece in made),
        tokens=tokens,
        finish_reason=finish,
        first_token_s=first,
        tokens_per_second=(len(tokens) - 1) / (last - first) if last > first and len(tokens) > 1 else None,
    )
