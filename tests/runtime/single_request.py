"""What a request gives when nobody else is there, and by how little it could have been something else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inlay.runtime.generation_state import GenerationState
from inlay.runtime.sampling import probabilities
from inlay.runtime.session import SequenceSession

if TYPE_CHECKING:
    from inlay.lowering.executable import Executable
    from inlay.runtime.request import Request
    from inlay.runtime.text_codec import TextCodec

CLOSE = 1e-4
"""Two scores that are closer than this may change places when sums are taken in another order."""


def alone(package: Executable, text: TextCodec, request: Request) -> tuple[list[int], list[float]]:
    """Tokens, and how far each was ahead of the next best: in scores, for drawn ones after chance had its say."""
    stepper = SequenceSession(package)
    writer = GenerationState(request, text, stepper.max_seq_len)
    given, tokens, ahead = list(request.prompt), [], []
    while True:
        scores = stepper.advance(given)
        best = _with_chance(scores, writer).topk(2)
        given = [writer.sample(scores)]
        assert given[0] == int(best.indices[0]), "this is how tokens are drawn"
        tokens += given
        ahead.append(float(best.values[0] - best.values[1]))
        if writer.add(given[0])[1]:
            return tokens, ahead


def _with_chance(scores: torch.Tensor, writer: GenerationState) -> torch.Tensor:
    """Scores whose largest is the token that will be drawn: `torch.multinomial` divides by exponential numbers."""
    sampling = writer.request.sampling
    if writer._generator is None:
        return scores
    same = torch.Generator().set_state(writer._generator.get_state())
    weights = probabilities(scores, writer.history, sampling)
    chance = torch.empty_like(weights).exponential_(1, generator=same)
    return (weights / chance).log() * sampling.temperature


def first_difference(found: list[int], wanted: list[int]) -> int | None:
    """Where two answers part, if they do.

    >>> first_difference([1, 2, 3], [1, 5, 3]), first_difference([1, 2], [1, 2]), first_difference([1], [1, 2])
    (1, None, 1)
    """
    pairs = zip(found, wanted, strict=False)
    short = min(len(found), len(wanted)) if len(found) != len(wanted) else None
    return next((at for at, (one, other) in enumerate(pairs) if one != other), short)
