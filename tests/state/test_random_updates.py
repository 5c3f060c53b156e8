"""Random models that read and write one state in random ways: in place or not, they compute what eager computes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.compile.program import compile_program
from inlay.state import canonical_updates, recognise
from inlay.testing import program_of

if TYPE_CHECKING:
    from inlay.program import Program

SHAPE = (2, 3, 8, 4)


def _view(rng: random.Random, cache: torch.Tensor) -> torch.Tensor:
    for _ in range(rng.choice((0, 1, 1, 2))):
        axis = rng.randrange(cache.dim())
        match rng.randrange(4):
            case 0 if cache.dim() > 1:
                cache = cache.select(axis, rng.randrange(cache.shape[axis]))
            case 1:
                start = rng.randrange(cache.shape[axis])
                cache = cache.narrow(axis, start, rng.randrange(1, cache.shape[axis] - start + 1))
            case 2:
                cache = cache.transpose(0, axis)
            case _:
                cache = cache.unsqueeze(axis).squeeze(axis)
    return cache


def _model(seed: int) -> Any:
    def model(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> Any:
        rng = random.Random(seed)
        seen, old = [], cache
        for _ in range(rng.randrange(2, 6)):
            part = _view(rng, cache)
            match rng.randrange(8):
                case 0:
                    seen.append(part.clone())
                case 1:
                    seen.append(part.sum())
                case 2:
                    part.copy_(x[: part.numel()].view(part.shape) if part.numel() <= x.numel() else part * 2)
                case 3 if part.shape[0] >= 2:
                    part.index_copy_(0, at[:1] % part.shape[0], part[:1] * 2 + x[0])
                case 4:
                    part.add_(x[0])
                case 5:
                    other = _view(rng, cache)
                    if other.shape == part.shape:
                        part.copy_(other + 1)
                case 6:
                    old = part
                case _:
                    part[..., :1] = x[1]
        return (*seen, old.sum())

    return model


def _shuffled(program: Program, rng: random.Random) -> Program:
    """The same functional program, its calls in another order that their operands allow."""
    made = program.copy()
    output = made.graph.output_node()
    waiting = [node for node in made.graph.nodes if node.op == "call_function"]
    while waiting:
        ready = [node for node in waiting if not any(each in waiting for each in node.all_input_nodes)]
        chosen = rng.choice(ready)
        waiting.remove(chosen)
        output.prepend(chosen)
    return made


def _check(seed: int, engine: str) -> bool:
    x, at = torch.randn(192), torch.tensor([3, 1])
    model = _model(seed)
    program = program_of(model, [torch.randn(SHAPE), x, at])
    shuffled = _shuffled(program, random.Random(seed))
    for each in (program, canonical_updates(program)[0], shuffled, canonical_updates(shuffled)[0]):
        compiled = compile_program(each, engine)
        one = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
        two = one.clone()
        expected, actual = model(one, x, at), compiled(two, x, at)
        torch.testing.assert_close(two, one)
        for left, right in zip(expected, actual, strict=True):
            torch.testing.assert_close(right, left)
    return all(state.eligible for state in recognise(shuffled))


def test_forty_models() -> None:
    eligible = [_check(seed, "eager") for seed in range(40)]
    assert 5 < sum(eligible) < 40, "some are in place, some cannot be"


@pytest.mark.nightly
def test_thousand_models() -> None:
    eligible = [_check(seed, "eager") for seed in range(1000, 2000)]
    assert 100 < sum(eligible) < 1000


@pytest.mark.nightly
def test_compiled_models() -> None:
    for seed in range(60):
        _check(seed, "inductor")
