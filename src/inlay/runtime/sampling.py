"""From logits to a token: the same steps, in the same order, as transformers takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from inlay.errors import ProgramError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_TEMPERATURE = 0.01
"""The lowest temperature above 0: below it float32 overflows, and the draw is greedy anyway."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. By default the likeliest is taken (temperature 0).

    >>> Sampling(temperature=0.7, top_p=0.9, seed=1).is_greedy
    False
    >>> Sampling(top_p=1.5)
    Traceback (most recent call last):
    inlay.errors.UsageError: top_p is 1.5, but must be above 0 and at most 1. 1 keeps every token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf"),
            f"temperature is {self.temperature}, but must be 0 or at least {MIN_TEMPERATURE}.",
            "0 takes the likeliest token.",
        )
        _check(self.top_k >= 0, f"top_k is {self.top_k}, but must not be negative.", "0 keeps every token.")
        _check(
            0 < self.top_p <= 1, f"top_p is {self.top_p}, but must be above 0 and at most 1.", "1 keeps every token."
        )
        _check(0 <= self.min_p <= 1, f"min_p is {self.min_p}, but must be from 0 to 1.", "0 keeps every token.")
        _check(
            0 < self.repetition_penalty < float("inf"),
            f"repetition_penalty is {self.repetition_penalty}, but must be above 0.",
            "1 changes nothing, more than 1 discourages repetition.",
        )
        _check(
            self.seed is None or 0 <= self.seed < 2**64,
            f"seed is {self.seed}, but must be from 0 to 2**64 - 1.",
            "Leave it out for another draw each time.",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    def generator(self) -> torch.Generator:
        """Fresh random numbers: the same for the same seed, others each time without one."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def sample(logits: torch.Tensor, history: Sequence[int], sampling: Sampling, generator: torch.Generator | None) -> int:
    """The next token after `history` (the prompt and what was generated), given its logits.

    >>> sample(torch.tensor([0.1, 2.0, 0.3]), [], Sampling(), torch.Generator())
    1
    """
    if not torch.isfinite(logits.max()):
        raise ProgramError(
            "The program returned logits that are not numbers.",
            "Its weights are damaged, or their number format is too narrow: build it again in float32.",
        )
    if sampling.is_greedy:
        return int(_penalize(logits, history, sampling.repetition_penalty).argmax())
    weights = probabilities(logits, history, sampling)
    return int(torch.multinomial(weights, 1, generator=generator))


def probabilities(logits: torch.Tensor, history: Sequence[int], sampling: Sampling) -> torch.Tensor:
    """How likely each token is to be drawn at a temperature above 0; 0 for those that are cut off.

    >>> probabilities(torch.tensor([1.0, 3.0, 3.0]), [], Sampling(temperature=1, top_k=2))
    tensor([0.0000, 0.5000, 0.5000])
    """
    scores = _penalize(logits, history, sampling.repetition_penalty) / sampling.temperature
    if sampling.top_k:
        kept = torch.topk(scores, min(sampling.top_k, len(scores))).values
        scores = _mask_out(scores, scores < kept[-1])
    if sampling.top_p < 1:
        scores = _mask_out(scores, _top_p_mask(scores, sampling.top_p))
    if sampling.min_p:
        likely = scores.softmax(-1)
        scores = _mask_out(scores, likely < sampling.min_p * likely.max())
    return scores.softmax(-1)


def _penalize(logits: torch.Tensor, history: Sequence[int], penalty: float) -> torch.Tensor:
    """Logits with those of tokens already seen made smaller, each once however often it was seen."""
    if penalty == 1:
        return logits
    seen = torch.tensor(history, dtype=torch.long)
    seen = seen[seen < len(logits)]
    values = logits[seen]
    return logits.scatter(0, seen, torch.where(values < 0, values * penalty, values / penalty))


def _top_p_mask(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Where the unlikeliest tokens are that make up no more than 1 - top_p; of equals, the first are cut first.

    numpy, which sorts values without positions, is ten times faster than torch, and this is done for every token.
    """
    ascending = torch.from_numpy(np.sort(scores.numpy()))
    share = ascending.softmax(-1).cumsum(-1)[:-1]  # the likeliest stays, whatever top_p is
    count = int((share <= 1 - top_p).sum())
    edge = ascending[count]
    beyond = scores < edge
    equals = (scores == edge).nonzero()[: count - int(beyond.sum()), 0]
    beyond[equals] = True
    return beyond


def _mask_out(scores: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(cut, -float("inf"))


def _check(holds: bool, problem: str, remedy: str) -> None:
    if not holds:
        raise UsageError(problem, remedy)
