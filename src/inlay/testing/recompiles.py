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
"""Stances of `torch.compiler.set_stance` that compile."""


@dataclass(frozen=True)
class CompileCounts:
    """Compilation counts, including the warm-up."""

    frames: int
    """Number of distinct Python frames."""
    recompiles: int
    """Number of recompiles of these frames."""
    graph_breaks: int
    """Number of graph breaks."""


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
    """Assert that nothing is compiled after the first `warmup` sets of inputs; the error names the failed guards.

    A single set is used `warmup` + 1 times. The compiler is reset first. The stance `fail_on_recompile` stops at the
    first recompile. With `eager_then_compile` the first call does not compile, so that the second call already marks
    changed sizes as dynamic; use `warmup=2`. `max_graph_breaks` also limits the number of graph breaks.

    >>> assert_no_recompiles(lambda x: x + 1, [(torch.ones(2),), (torch.zeros(2),)], backend="eager")
    CompileCounts(frames=1, recompiles=0, graph_breaks=0)
    """
    if stance not in STANCES:
        raise UsageError(f"The stance {stance} does not compile.", f"Choose {', '.join(STANCES)}.")
    sets = as_input_sets(inputs)
    sets = sets if len(sets) > 1 else sets * (warmup + 1)
    if warmup >= len(sets):
        raise UsageError(f"The warm-up uses all {len(sets)} sets of inputs.", "Give more sets, or a smaller warmup.")
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
    assert first or later, "Nothing was compiled, so nothing was checked. Check that torch.compile is on."
    lost = [each for each in first if each.has_hit_limit]
    assert not lost, (
        f"The warm-up reaches the recompile limit; later calls run eagerly.\n{_format_frames(lost)}\n{_REMEDY}"
    )
    assert not stopped, f"The function would be recompiled.\n{stopped}\n{_REMEDY}"
    assert not later, f"{len(later)} frames were compiled after the warm-up.\n{_format_frames(later)}\n{_REMEDY}"
    cuts = graph_breaks() - broken
    if max_graph_breaks is not None:
        reasons = "\n".join(f"  {reason} ({count} times)" for reason, count in cuts.items())
        assert cuts.total() <= max_graph_breaks, f"{cuts.total()} graph breaks:\n{reasons}"
    again = sum(bool(each.reason) for each in first)
    return CompileCounts(len({each.frame for each in first}), again, cuts.total())


_REMEDY = (
    "Make changing sizes dynamic (dynamic=True, torch._dynamo.mark_dynamic), pass changing numbers as tensors, "
    "or increase warmup."
)


def _format_frames(made: list[CompiledFrame]) -> str:
    return "\n".join(
        f"  {each.name} ({each.location}): {each.reason or 'first compilation; the warm-up does not reach it'}"
        for each in made
    )
