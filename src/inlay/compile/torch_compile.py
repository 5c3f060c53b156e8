"""`torch.compile(model, backend="inlay")`: Inlay's transforms inside someone's existing code."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from inlay.compile.below import BELOW, run_below, runnable
from inlay.compile.pieces import piece_of
from inlay.config import resolve
from inlay.errors import CaptureError, UsageError, nearest
from inlay.transforms import Record, Transform, configure, run
from inlay.transforms.pipeline import Step
from inlay.transforms.structured_trace import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import fx

    from inlay.program.program import Program

_LOG = logging.getLogger("inlay")
_PIECE = "torch.compile hands over pieces of a model"


@dataclass(frozen=True)
class Compiled:
    """What became of one piece that torch.compile handed over."""

    program: Program | None
    """After the transforms; None where the piece runs as it came."""
    records: tuple[Record, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences: why a piece runs as it came, which anchor stayed unmatched."""


@dataclass(frozen=True)
class _Options:
    below: str = "eager"
    config: Sequence[Path | str] = ()
    set: Sequence[str] = ()
    on_compiled: Callable[[Compiled], None] | None = None


def inlay(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend. Options: `below` (`eager` or `inductor`), `config` (files), `set` (settings), `on_compiled`
    (called with a `Compiled` for every piece).

    >>> from inlay.compile import inlay
    >>> def twice(x):
    ...     return torch.nn.functional.silu(x) * (x + 1)
    >>> seen = []
    >>> fast = torch.compile(twice, backend=inlay, options={"on_compiled": seen.append})
    >>> torch.equal(fast(torch.ones(3)), twice(torch.ones(3)))
    True
    >>> seen[0].program.op_counts()["inlay.swiglu.default"]
    1
    """
    chosen = _options(options, mode)
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
        raise UsageError(
            "Inlay compiles for inference, and gradients are on for an input or a parameter.",
            "Call the compiled model within torch.no_grad().",
        )
    steps = configure(resolve(files=chosen.config, settings=chosen.set))
    try:
        piece = piece_of(module)
    except CaptureError as error:
        made = Compiled(None, notes=(f"A piece runs as it came: {error}",))
    else:
        result, made = _transform(piece.program, steps)
        module = runnable(result, piece.same)
    _tell(made, chosen)
    return run_below(chosen.below, module, inputs)


def _options(given: Mapping[str, Any] | None, mode: str | None) -> _Options:
    if mode is not None:
        raise UsageError(f"The backend has no mode {mode}.", 'Use options={"below": "inductor"} and so on.')
    known = _Options.__dataclass_fields__
    for name in given or {}:
        if name not in known:
            raise UsageError(
                f"The backend has no option {name}.", nearest(name, known) or f"It has {', '.join(known)}."
            )
    chosen = _Options(**(given or {}))
    if chosen.below not in BELOW:
        raise UsageError(f"Nothing called {chosen.below} runs below.", f"Choose {' or '.join(BELOW)}.")
    return chosen


def _transform(program: Program, steps: list[Step]) -> tuple[Program, Compiled]:
    unmet = _Unmet(frozenset(step.key for step in steps if step.transform.options.expect is None))
    result, records = run(program, [_without_contract(step) for step in steps], [unmet, *tracing()])
    return result, Compiled(result, tuple(records), tuple(unmet.notes))


def _without_contract(step: Step) -> Step:
    """Where nothing was stated, a piece of a model owes nothing: the rest of a norm may be in the next piece."""
    if step.transform.options.expect is not None:
        return step
    options = step.transform.options.model_copy(update={"expect": "any", "reason": _PIECE})
    return Step(step.key, type(step.transform)(options))


@dataclass
class _Unmet:
    """Notes where a contract would have failed for a whole model."""

    keys: frozenset[str]
    notes: list[str] = field(default_factory=list)
    _anchors: list[str] = field(default_factory=list)

    def before(self, step: Transform, program: Program) -> None:
        counts = program.op_counts()
        self._anchors = [name for name in step.anchors if counts.get(name)]

    def after(self, step: Transform, program: Program, record: Record) -> None:
        if record.key in self.keys and record.status == "ran" and not record.sites and self._anchors:
            why = record.misses[0].reason if record.misses else "nothing starts like it"
            self.notes.append(f"{record.key} matched nothing although there is {', '.join(self._anchors)}: {why}.")


def _tell(made: Compiled, options: _Options) -> None:
    for record in made.records:
        _LOG.info("inlay: %s", record.summary)
    for note in made.notes:
        _LOG.warning("inlay: %s", note)
    if options.on_compiled is not None:
        options.on_compiled(made)
