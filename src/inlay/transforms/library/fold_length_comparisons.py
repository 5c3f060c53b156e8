"""Fold a choice by the length that is the same at every length the program accepts.

where(max(arange(length)) + 1 > 4096, long, short)        short        # at most 4096 tokens
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inlay.analysis.length_choices import find_length_choices
from inlay.errors import UsageError
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import all_graphs, has_same_type, is_copy_observable
from inlay.rewrite import Match, Reason, Refusal
from inlay.transforms import base
from inlay.transforms.base import Case, Numerics, ProgramTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.program.program import Program
    from inlay.rewrite import Rewriter

aten = torch.ops.aten


@transform("fold_length_comparisons", stage=Stage.CLEAN, numerics=Numerics.EXACT)
class FoldLengthComparisons(ProgramTransform):
    """Fold a choice by the length that is the same at every length; `max_length` limits the length."""

    class Options(base.TransformOptions):
        """`max_length`: the program accepts no longer sequences (default: the captured maximum)."""

        max_length: int = 0

    @classmethod
    def positive_cases(cls) -> list[Case]:
        x, w = torch.randn(2, 5, 8), torch.randn(8)

        def positive(x: Tensor, w: Tensor) -> Tensor:
            positions = torch.arange(x.shape[1])[None]
            return x * torch.where(positions.max() + 1 > 0, w, -w)

        def never(x: Tensor, w: Tensor) -> Tensor:
            return x * torch.where((3 - torch.arange(x.shape[1])).amin() > 3, w, -w)

        return [Case("true at every length", positive, (x, w), axes=_AXES), Case("never", never, (x, w), axes=_AXES)]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        x, w = torch.randn(2, 5, 8), torch.randn(8)

        def longer(x: Tensor, w: Tensor) -> Tensor:
            return x * torch.where(torch.arange(x.shape[1]).max() + 1 > 4096, w, -w)

        def by_values(x: Tensor, w: Tensor) -> Tensor:
            return x * torch.where(x.max() > 0, w, -w)

        def by_position(x: Tensor, w: Tensor) -> Tensor:
            return torch.where((torch.arange(x.shape[1]) >= 0)[None, :, None], x, w)

        def broadcast(x: Tensor, w: Tensor) -> Tensor:
            return torch.where(torch.arange(x.shape[1]).max() < 0, x, w)

        return [
            Case("longer than a constant", longer, (x, w), axes=_AXES),
            Case("values decide", by_values, (x, w), axes=_AXES),
            Case("each position decides", by_position, (x, w), axes=_AXES),
            Case("the chosen value is broadcast", broadcast, (x, w), axes=_AXES),
        ]

    def prepare(self, rewriter: Rewriter) -> None:
        """State the maximum length."""
        most, program = self.options.max_length, rewriter.program
        if not most:
            return
        name, length = next(((raw, each) for raw, each in program.symbols.items() if each.name == "length"), ("", None))
        if length is None:
            raise UsageError("max_length is set, but the program has no axis called length.")
        if length.high is None or most < length.high:
            rewriter.update(symbols={**program.symbols, name: replace(length, high=most)})

    def plan(self, program: Program) -> Iterator[Match | Refusal]:
        for choice in find_length_choices(program):
            node, given = choice.node, dict(normalize_args(choice.node))
            chosen = given["self"] if choice.always else given["other"]
            if choice.always is None:
                yield Refusal(node, choice.condition, Reason.REFUSED, choice.reason, 1, 2)
            elif not has_same_type(chosen, node):
                yield Refusal(node, chosen, Reason.SHAPE, f"{chosen} is broadcast or converted", 1, 2)
            elif is_copy_observable(node):
                yield Refusal(
                    node, node, Reason.REFUSED, "its result is a copy that is returned or written in place", 1, 2
                )
            else:
                yield Match.at(node, chosen=chosen)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        rewriter.replace(match.root, match.values["chosen"])
        rewriter.erase(match.root)

    def clean_up(self, rewriter: Rewriter) -> None:
        """Erase the comparisons and the values that are not chosen."""
        for _, graph in all_graphs(rewriter.program.graph):
            rewriter.erase_unused(*reversed(graph.nodes))


_AXES = {"x": {0: "batch", 1: "length"}}
