"""`assert_no_recompiles`: one compiled function serves all inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import UsageError
from inlay.testing.compiler import graph_breaks, record_compiles
from inlay.testing.inputs import as_input_sets, call, compile_model, copy_inputs, copy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inlay.testing.compiler import CompiledFrame
    from inlay.testing.inputs import Inputs, Model

STANCES = ("default", "fail_on_recompile", "eager_then_compile", "aot_eager_then_compile")
"""Stances of `torch.compiler.set_stance` under which there is something to count."""


@dataclass(frozen=True)
class CompileCounts:
    """What was compiled, those during the warm-up included."""

    frames: int
    """Different pieces of Python."""
    recompiles: int
    """How often one of them was compiled again."""
    graph_breaks: int
    """How often a function was cut in two."""


def assert_no_recompiles(
    model: Model,
    inputs: Inputs | list[Inputs],
    *,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    stance: str = "default",
    warmup: int = 1,
    max_graph_breaks: int | None = None,
) -> CompileCounts:
    """After the first `warmup` sets of inputs nothing is compiled any more; else says which guard of what failed.

    A single set is given twice. The compiler is reset first. With the stance `fail_on_recompile` the first recompile is
    the last thing that happens; with `eager_then_compile` the first call does not compile, so sizes that change are
    known to change when the second does: `warmup=2`. `max_graph_breaks` also bounds the cuts in the function.

    >>> assert_no_recompiles(lambda x: x + 1, [(torch.ones(2),), (torch.zeros(2),)], backend="eager")
    CompileCounts(frames=1, recompiles=0, graph_breaks=0)
    """
    if stance not in STANCES:
        raise UsageError(f"Under the stance {stance} nothing is compiled again.", f"Choose {', '.join(STANCES)}.")
    sets = as_input_sets(inputs)
    sets = sets if len(sets) > 1 else sets * (warmup + 1)
    if warmup >= len(sets):
        raise UsageError(f"All {len(sets)} sets of inputs are for the warm-up.", "Give more, or a smaller warmup.")
    torch.compiler.reset()
    broken = graph_breaks()
    fast = compile_model(copy_model(model), backend, options, dynamic)
    early = "default" if stance == "fail_on_recompile" else stance
    with record_compiles() as first, torch.compiler.set_stance(early):
        for each in sets[:warmup]:
            call(fast, copy_inputs(each))
    stopped = ""
    with record_compiles() as later, torch.compiler.set_stance(stance):
        for index, each in enumerate(sets[warmup:], warmup):
            try:
                call(fast, copy_inputs(each))
            except RuntimeError as error:
                if "fail_on_recompile" not in str(error):
                    raise
                stopped = f"inputs {index}: {error}"
                break
    assert first or later, "Nothing was compiled, so nothing was checked. Is torch.compile disabled?"
    lost = [each for each in first if each.has_hit_limit]
    assert not lost, (
        f"The warm-up compiles too often, so that later calls run eagerly.\n{_format_frames(lost)}\n{_REMEDY}"
    )
    assert not stopped, f"The function would be compiled again.\n{stopped}\n{_REMEDY}"
    assert not later, (
        f"{len(later)} times something was compiled after the warm-up.\n{_format_frames(later)}\n{_REMEDY}"
    )
    cuts = graph_breaks() - broken
    if max_graph_breaks is not None:
        reasons = "\n".join(f"  {reason} ({count} times)" for reason, count in cuts.items())
        assert cuts.total() <= max_graph_breaks, f"{cuts.total()} graph breaks:\n{reasons}"
    again = sum(bool(each.reason) for each in first)
    return CompileCounts(len({each.frame for each in first}), again, cuts.total())


_REMEDY = (
    "Sizes that change can be dynamic (dynamic=True, torch._dynamo.mark_dynamic); numbers that change can be tensors; "
    "a larger warmup lets the first calls compile."
)


def _format_frames(made: list[CompiledFrame]) -> str:
    return "\n".join(
        f"  {each.name} ({each.location}): {each.reason or 'for the first time, so the warm-up does not reach it'}"
        for each in made
    )
