"""Run every transform on a program and compare numbers, written inputs and types before and after."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.graphs import target_text
from inlay.program.weights import Derived
from inlay.transforms.base import Numerics, find, registry
from inlay.transforms.pipeline import check_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.program.program import Program

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass(frozen=True, eq=False)
class Break:
    """A transform that changed what a program computes, or did not survive it."""

    transform: str
    program: Program
    inputs: Mapping[str, torch.Tensor]
    problem: str


@dataclass
class Tally:
    """How often each transform fired, and what it refused."""

    fired: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


def check(
    program: Program, inputs: Mapping[str, torch.Tensor], transforms: Sequence[str] = (), tally: Tally | None = None
) -> Break | None:
    """Run the transforms one after the other, each on what the one before made; the first that breaks something."""
    try:
        expected, shared, _ = compute(program, inputs)
    except (RuntimeError, IndexError):
        return None  # the program itself cannot be computed: nothing to compare
    for name in transforms or registry():
        transform = find(name)()
        try:
            applied = transform.apply(program.copy())
            check_metadata(applied.program)
        except Exception as error:
            return Break(name, program, _given(program, inputs), f"raised {type(error).__name__}: {error}")
        if tally is not None:
            tally.fired[name] += applied.sites
            tally.refused[name] += len(applied.misses)
        if not applied.sites or transform.adds_inputs:
            continue  # nothing to compare, or nothing to compare with: such a transform has a test of its own
        try:
            actual, sharing, wrong = compute(applied.program, inputs)
        except (RuntimeError, IndexError) as error:
            return Break(name, program, _given(program, inputs), f"the result cannot be computed: {error}")
        problem = wrong or differs(expected, actual, transform.numerics)
        if not problem and not sharing <= shared:
            problem = f"values {sorted(sharing - shared)[0]} share storage now, inputs counted after outputs"
        if problem:
            return Break(name, program, _given(program, inputs), problem)
        program, expected, shared = applied.program, actual, sharing
    return None


def _given(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs, and the weights that transforms before made of them."""
    made = {name: tensor.read() for name, tensor in program.tensors.items() if isinstance(tensor, Derived)}
    return {**inputs, **made}


def compute(
    program: Program, inputs: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], set[tuple[int, int]], str]:
    """Outputs and inputs after a run, which of them share storage, and a node whose value is not what it states."""
    torch.manual_seed(0)
    held = {name: value.clone() for name, value in inputs.items()}
    values: dict[fx.Node, Any] = {}
    wrong = ""
    result: list[torch.Tensor] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            made = program.tensors.get(node.name)
            values[node] = made.read() if isinstance(made, Derived) else held[node.name]
        elif node.op == "output":
            result = list(fx.map_arg(node.args[0], values.__getitem__))
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            stated = node.meta["val"]
            if isinstance(stated, torch.Tensor) and not wrong and not _same_type(stated, values[node]):
                wrong = f"{node} ({target_text(node.target)}) states {_type(stated)} and is {_type(values[node])}"
    every = [*result, *held.values()]
    places = [value.untyped_storage().data_ptr() for value in every]
    shared = {(one, two) for two in range(len(every)) for one in range(two) if places[one] == places[two] != 0}
    return [value.clone() for value in every], shared, wrong


def _same_type(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and tuple(one.shape) == tuple(two.shape)


def _type(value: torch.Tensor) -> str:
    return f"{value.dtype}{list(value.shape)}"


def differs(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor], numerics: Numerics) -> str:
    """How two results differ, if they do: not at all when the transform says it is exact."""
    for index, (one, two) in enumerate(zip(expected, actual, strict=True)):
        if not _same_type(one, two):
            return f"value {index} was {_type(one)} and is {_type(two)}"
        if not one.is_floating_point() or numerics is Numerics.EXACT:
            same = torch.equal(torch.nan_to_num(one), torch.nan_to_num(two)) and torch.equal(one.isnan(), two.isnan())
            if not same:
                return f"value {index} differs, and the transform says it is exact"
            continue
        finite = one.isfinite()
        if not torch.equal(finite, two.isfinite()):
            return f"value {index} is finite in other places"
        gap = (one[finite].double() - two[finite].double()).abs()
        scale = 1 + one[finite].double().abs().max() if gap.numel() else torch.tensor(1.0)
        if gap.numel() and gap.max() > _TOLERANCE[one.dtype] * scale:
            return f"value {index} differs by {gap.max():.3g} where values are at most {scale - 1:.3g}"
    return ""
