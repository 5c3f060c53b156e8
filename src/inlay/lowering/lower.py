"""Lower a transformed program: split it into pieces for each bucket of sizes, and compile it for this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inlay.analysis.state_updates import find_state_updates
from inlay.errors import UsageError, suggest
from inlay.lowering.backends import find_backend
from inlay.lowering.buckets import Bucket
from inlay.lowering.executable import BoundStep, Executable, PlanExecutor
from inlay.lowering.plan import make_plan
from inlay.lowering.state.in_place_writes import copy_remarks
from inlay.lowering.state.state_copies import find_compiled_copies, find_eager_copies

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from inlay.lowering.plan import Plan
    from inlay.program.program import Program, Symbol

SizeRanges = dict[str, tuple[int, int | None]]


@dataclass(frozen=True)
class LoweredProgram:
    """A program split into pieces, once for each bucket of sizes. The last bucket accepts all sizes."""

    program: Program
    buckets: tuple[tuple[str, SizeRanges, Plan], ...]


def lower(program: Program, buckets: Sequence[str] = ()) -> LoweredProgram:
    """Make a plan for each of these buckets (`length=1`, `batch=1,length=2..64`), and one for all sizes."""
    symbols = {symbol.name: symbol for symbol in program.symbols.values()}
    every = _all_sizes(symbols)
    wanted = [_parse_bucket(text, symbols) for text in buckets]
    named = [(text.replace(" ", ""), sizes) for text, sizes in zip(buckets, wanted, strict=True)]
    plans = ((name, sizes, make_plan(program, sizes)) for name, sizes in (*named, ("all", every)))
    return LoweredProgram(program, tuple(plans))


def _all_sizes(symbols: Mapping[str, Symbol]) -> SizeRanges:
    return {name: (symbol.low, symbol.high) for name, symbol in symbols.items()}


def _parse_bucket(text: str, symbols: Mapping[str, Symbol]) -> SizeRanges:
    """Parse the text of a bucket.

    >>> from inlay.program.program import Symbol
    >>> _parse_bucket("length=1", {"batch": Symbol("batch", 1, 4), "length": Symbol("length", 1, 64)})
    {'batch': (1, 4), 'length': (1, 1)}
    """
    sizes = _all_sizes(symbols)
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        low, dots, high = value.partition("..")
        if not equals or not low.isdigit() or (high and not high.isdigit()):
            raise UsageError(
                f"{text!r} is not a bucket.", "Write --buckets length=1 or --buckets batch=1,length=2..64."
            )
        if name not in symbols:
            known = suggest(name, symbols) or f"It has {', '.join(symbols)}."
            raise UsageError(f"The program has no size {name}.", known)
        floor, ceiling = symbols[name].low, symbols[name].high
        least, most = int(low), int(high) if high else ceiling if dots else int(low)
        if least < floor or (ceiling is not None and (most is None or most > ceiling)):
            limit = symbols[name].limited_by
            hint = f"The option {limit} sets the largest {name}." if limit else ""
            raise UsageError(f"{text}: {name} must be within {floor} … {ceiling}.", hint)
        sizes[name] = (least, most)
    return sizes


def compile_lowered(lowered: LoweredProgram, backend: str = "inductor") -> Executable:
    """Compile all pieces with a backend. Weights are read once and shared by all buckets."""
    program = lowered.program
    used = {name for _, _, plan in lowered.buckets for step in plan.steps for name in step.constants}
    weights = {name: program.tensors[name].read() for name in used}
    initial = {
        row.name: program.tensors[row.name].read().clone()  # the model writes to the tensor itself when it is called
        for row in program.bindings.state
        if row.name in program.tensors
    }
    buckets = [
        (Bucket(name, sizes, (), (), plan.results), _execution(plan, backend, weights))
        for name, sizes, plan in lowered.buckets
    ]
    states = find_eager_copies(find_state_updates(program)) if backend == "eager" else find_compiled_copies(program)
    devices = {value.device for value in weights.values()}
    return Executable(program.bindings, buckets, initial, copy_remarks(states), *(devices if len(devices) == 1 else ()))


def _execution(plan: Plan, backend: str, weights: dict[str, torch.Tensor]) -> PlanExecutor:
    pieces = {piece.name: piece for piece in plan.pieces}
    code = {name: find_backend("eager" if piece.is_eager else backend)(piece.program) for name, piece in pieces.items()}
    steps = []
    for step in plan.steps:
        names = [row.name for row in pieces[step.piece].constants]
        held = {name: weights[of] for name, of in zip(names, step.constants, strict=True)}
        steps.append(BoundStep(code[step.piece](held), step.ins, step.outs))
    return PlanExecutor(steps, plan.results)
