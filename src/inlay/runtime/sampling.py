"""Sampling of a token from logits, with the same steps in the same order as transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from inlay.errors import ProgramError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_TEMPERATURE = 0.01
"""The lowest temperature above 0. Below it float32 overflows, and sampling is greedy in effect."""


@dataclass(frozen=True)
class Sampling:
    """Parameters for choosing the next token. The default is greedy (temperature 0).

    >>> Sampling(temperature=0.7, top_p=0.9, seed=1).is_greedy
    False
    >>> Sampling(top_p=1.5)
    Traceback (most recent call last):
    inlay.errors.UsageError: top_p is 1.5, but must be above 0 and at most 1. Use 1 to keep every token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    """Subtracted from the logits of generated tokens."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of generated tokens, for each time that they were generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what is added to their logits."""

    def __post_init__(self) -> None:
        _check(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf"),
            f"temperature is {self.temperature}, but must be 0 or at least {MIN_TEMPERATURE}.",
            "Use 0 for greedy decoding.",
        )
        _check(self.top_k >= 0, f"top_k is {self.top_k}, but must not be negative.", "Use 0 to keep every token.")
        _check(
            0 < self.top_p <= 1,
            f"top_p is {self.top_p}, but must be above 0 and at most 1.",
            "Use 1 to keep every token.",
        )
        _check(0 <= self.min_p <= 1, f"min_p is {self.min_p}, but must be from 0 to 1.", "Use 0 to keep every token.")
        _check(
            0 < self.repetition_penalty < float("inf"),
            f"repetition_penalty is {self.repetition_penalty}, but must be above 0.",
            "Use 1 for no penalty, or more than 1 to discourage repetition.",
        )
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            _check(-2 <= value <= 2, f"{name}_penalty is {value}, but must be from -2 to 2.", "Use 0 for no penalty.")
        for token, bias in self.logit_bias:
            _check(token >= 0, f"logit_bias has the token {token}.", "Tokens are counted from 0.")
            _check(-100 <= bias <= 100, f"logit_bias of token {token} is {bias}.", "Use values from -100 to 100.")
        _check(
            self.seed is None or 0 <= self.seed < 2**64,
            f"seed is {self.seed}, but must be from 0 to 2**64 - 1.",
            "Omit it for a random seed.",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token with the largest logit is always chosen."""
        return self.is_greedy and not self._changes_logits

    @property
    def _changes_logits(self) -> bool:
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)

    def generator(self) -> torch.Generator:
        """Return a new random generator, with the given seed or a random one."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def sample(
    logits: torch.Tensor,
    history: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator | None,
    prompt_tokens: int = 0,
) -> int:
    """Sample the next token from its logits, after `history`: the tokens of the prompt, then generated ones.

    >>> sample(torch.tensor([0.1, 2.0, 0.3]), [], Sampling(), torch.Generator())
    1
    """
    check_finite(float(logits.max()))
    if sampling.is_greedy:
        return int(_adjust(logits, history, sampling, prompt_tokens).argmax())
    weights = probabilities(logits, history, sampling, prompt_tokens)
    return int(torch.multinomial(weights, 1, generator=generator))


def check_finite(largest: float) -> None:
    """Raise an error if the largest logit is not finite."""
    if not math.isfinite(largest):
        raise ProgramError(
            "The program returned logits that are not finite.",
            "Check the weights, or build it again in float32: the dtype may be too narrow.",
        )


def probabilities(
    logits: torch.Tensor, history: Sequence[int], sampling: Sampling, prompt_tokens: int = 0
) -> torch.Tensor:
    """Return the probability of each token at a temperature above 0; 0 for tokens removed by top-k, top-p or min-p.

    >>> probabilities(torch.tensor([1.0, 3.0, 3.0]), [], Sampling(temperature=1, top_k=2))
    tensor([0.0000, 0.5000, 0.5000])
    """
    scores = _adjust(logits, history, sampling, prompt_tokens) / sampling.temperature
    if sampling.top_k:
        kept = torch.topk(scores, min(sampling.top_k, len(scores))).values
        scores = _mask_out(scores, scores < kept[-1])
    if sampling.top_p < 1:
        scores = _mask_out(scores, _top_p_mask(scores, sampling.top_p))
    if sampling.min_p:
        likely = scores.softmax(-1)
        scores = _mask_out(scores, likely < sampling.min_p * likely.max())
    return scores.softmax(-1)


def _adjust(logits: torch.Tensor, history: Sequence[int], sampling: Sampling, prompt_tokens: int) -> torch.Tensor:
    """Apply logit_bias, then the penalties."""
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        if max(tokens) >= len(logits):
            raise UsageError(f"logit_bias has the token {max(tokens)}.", f"The model has {len(logits)} tokens.")
        logits = logits.index_add(0, torch.tensor(tokens), torch.tensor(biases, dtype=logits.dtype))
    logits = _penalize(logits, history, sampling.repetition_penalty)
    generated = history[prompt_tokens:]
    if (sampling.presence_penalty or sampling.frequency_penalty) and generated:
        counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=len(logits))[: len(logits)]
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return logits


def _penalize(logits: torch.Tensor, history: Sequence[int], penalty: float) -> torch.Tensor:
    """Apply the repetition penalty to the logits of tokens in `history`, once per token."""
    if penalty == 1:
        return logits
    seen = torch.tensor(history, dtype=torch.long)
    seen = seen[seen < len(logits)]
    values = logits[seen]
    return logits.scatter(0, seen, torch.where(values < 0, values * penalty, values / penalty))


def _top_p_mask(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return a mask of the least likely tokens with a total probability of at most 1 - top_p.

    Of equal logits, the first are removed first. numpy sorts values without indices, ten times faster than torch; this
    runs for every token.
    """
    ascending = torch.from_numpy(np.sort(scores.numpy()))
    share = ascending.softmax(-1).cumsum(-1)[:-1]  # the most likely token is always kept
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
