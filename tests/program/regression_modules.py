"""Small modules that were once captured, folded, dumped or compared wrongly."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from inlay import Example

SIZE = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.two(nn.functional.silu(self.one(x)))).tanh()


class Stack(nn.Module):
    """Six layers; subclasses say how they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.h0 = torch.ones(3, SIZE)


class Skip(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return seen[0] + seen[-1]


class All(Stack):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return tuple(seen)


class TwoBack(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x
        for layer in self.layers:
            before, x = x, layer(x) + before
        return x


class Swap(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x, x * 2
        for layer in self.layers:
            a, b = b, a + layer(b)
        return a - b


class OutOfOrder(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 2, 1, 3, 5, 4):
            x = self.layers[index](x)
        return x


class ConstantStart(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.h0
        for layer in self.layers:
            h = layer(h)
        return h + x


class Kept(nn.Module):
    """A cache in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        for index in range(4):
            self.register_buffer(f"kept_{index}", torch.zeros(3, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            getattr(self, f"kept_{index}").copy_(x)
        return x


class SameName(nn.Module):
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(3))

    def forward(self, cache: torch.Tensor) -> torch.Tensor:
        self.cache.add_(1)
        cache.add_(10)
        return cache * 2 + self.cache


class NestedBranches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def outer(y: torch.Tensor) -> torch.Tensor:
            return torch.cond(y.max() > 5, lambda z: z * 2, lambda z: z - 1, (y,))

        return torch.cond(x.sum() > 0, outer, lambda y: y + 1, (x,))


class Awkward(nn.Module):
    """Comparisons of comparisons, views to nothing, infinite constants, arguments called like our own names."""

    def forward(self, w: torch.Tensor, model: torch.Tensor) -> tuple[torch.Tensor, ...]:
        limit = torch.tensor([float("inf"), float("-inf"), 1.0])
        return (w > 0) == (model > 0), w.sum().view(()), torch.minimum(w[:, :3], limit)


class Numbers(nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> tuple[Any, ...]:
        return x * n, x.shape[0], x.shape[0] * 0.5, x.shape[0] > 3


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


class Fours(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] // 4, 4, SIZE).sum(1)


@torch.library.custom_op("inlay_zoo::store", mutates_args={"into"})
def store(into: torch.Tensor, value: torch.Tensor) -> None:
    into.copy_(value)


class Mutating(nn.Module):
    def forward(self, cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.ops.inlay_zoo.store(cache, x * 2)
        return cache + 1


def examples() -> dict[str, Example]:
    torch.manual_seed(0)
    x = torch.randn(3, SIZE)
    batch = {"x": {0: "batch"}}
    made = {cls.__name__: Example(cls(), (x,)) for cls in (Skip, All, TwoBack, Swap, OutOfOrder, ConstantStart, Kept)}
    made |= {
        f"{name} dynamic": Example(each.module, each.args, axes=batch)
        for name, each in made.items()
        if name in ("Skip", "Swap")
    }
    return made | {
        "NestedBranches": Example(NestedBranches(), (x,)),
        "Awkward": Example(Awkward(), (x, x.flip(0))),
        "Numbers": Example(Numbers(), (x, 3), axes=batch),
        "Positions": Example(Positions(), (torch.randn(2, 5, SIZE),), axes={"x": {1: "length"}}),
        "Fours": Example(Fours(), (torch.randn(8, SIZE),), axes=batch),
        "Mutating": Example(Mutating(), (torch.zeros(3, SIZE), x)),
    }


def fresh(example: Example) -> tuple[nn.Module, list[Any]]:
    """The module and arguments again, untouched."""
    return copy.deepcopy(example.module), copy.deepcopy(list(example.args))
