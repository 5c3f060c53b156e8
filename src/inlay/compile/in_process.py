"""Plans that run in the process that made them, on any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.compile.engines import find_engine
from inlay.compile.execute import BoundStep, Executable, Execution
from inlay.compile.manifest import Bucket
from inlay.state import recognise, remarks_on, under_compilers, under_eager

if TYPE_CHECKING:
    import torch

    from inlay.compile.pack import Lowered
    from inlay.compile.plan import Plan


def compile_lowered(lowered: Lowered, engine: str = "inductor") -> Executable:
    """Compile all pieces with an engine; weights are read once and shared by all buckets."""
    program = lowered.program
    used = {name for _, _, plan in lowered.buckets for step in plan.steps for name in step.constants}
    weights = {name: program.tensors[name].read() for name in used}
    initial = {
        row.name: program.tensors[row.name].read() for row in program.bindings.state if row.name in program.tensors
    }
    buckets = [
        (Bucket(name, sizes, (), (), plan.results), _execution(plan, engine, weights))
        for name, sizes, plan in lowered.buckets
    ]
    states = under_eager(recognise(program)) if engine == "eager" else under_compilers(program)
    return Executable(program.bindings, buckets, initial, remarks_on(states))


def _execution(plan: Plan, engine: str, weights: dict[str, torch.Tensor]) -> Execution:
    pieces = {piece.name: piece for piece in plan.pieces}
    code = {name: find_engine("eager" if piece.plain else engine)(piece.program) for name, piece in pieces.items()}
    steps = []
    for step in plan.steps:
        names = [row.name for row in pieces[step.piece].constants]
        held = {name: weights[of] for name, of in zip(names, step.constants, strict=True)}
        steps.append(BoundStep(code[step.piece](held), step.ins, step.outs))
    return Execution(steps, plan.results)
