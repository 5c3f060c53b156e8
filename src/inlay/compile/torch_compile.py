"""`torch.compile(model, backend="inlay")`: Inlay's transforms inside someone's existing code."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from inlay.compile.below import BELOW, begins_again, run_below, runnable
from inlay.compile.pieces import piece_of
from inlay.config import resolve
from inlay.errors import CaptureError, ContractError, InlayError, TransformError, UsageError, nearest, one_line
from inlay.program.remarks import Remark, RemarkKind
from inlay.transforms import Record, Transform, configure, run
from inlay.transforms.pipeline import Step
from inlay.transforms.structured_trace import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import fx

    from inlay.program.program import Program
    from inlay.transforms.pipeline import Instrument

_LOG = logging.getLogger("inlay")
_PIECE = "torch.compile hands over pieces of a model"


@dataclass(frozen=True)
class Compiled:
    """What became of one piece that torch.compile handed over."""

    program: Program | None
    """After the transforms; None where the piece runs as it came."""
    records: tuple[Record, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences: why a piece runs as it came, which transform was left out, which state is copied, which anchor stayed
    unmatched."""


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
    """The backend. Options: `below` (`eager`, `aot_eager` or `inductor`), `config` (files), `set` (settings),
    `on_compiled` (called with a `Compiled` for every piece).

    Whatever torch runs, it runs: a transform that fails is left out, and a piece that cannot be rewritten runs as it
    came, both with a note. Mistakes in the options and counts that were stated and are not met are errors.

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
    steps = configure(resolve(files=chosen.config, settings=chosen.set))
    made, rewritten = _rewrite(module, inputs, steps, chosen.below)
    if rewritten is not None:
        try:
            fast = run_below(chosen.below, rewritten, inputs)
        except Exception as error:
            if begins_again(error):
                raise
            made = _as_it_came(
                f"{chosen.below} cannot run what the transforms made of it: {_told(error)}", made.records
            )
        else:
            _tell(made, chosen)
            return fast
    try:
        fast = run_below(chosen.below, module, inputs)
    except Exception as error:
        if begins_again(error):
            raise
        fast = module.forward
        made = replace(made, notes=(*made.notes, f"A piece runs eagerly: {chosen.below} cannot run it: {_told(error)}"))
    _tell(made, chosen)
    return fast


def _rewrite(
    module: fx.GraphModule, inputs: Sequence[Any], steps: list[Step], below: str
) -> tuple[Compiled, fx.GraphModule | None]:
    """The piece after the transforms; None where it runs as it came. What eager runs never fails here."""
    tensors = (*module.parameters(), *(each for each in inputs if isinstance(each, torch.Tensor)))
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return _as_it_came("gradients are on, and transforms are for inference. Call it within torch.no_grad()."), None
    records: tuple[Record, ...] = ()
    try:
        piece = piece_of(module)
        made = _transform(piece.program, steps)
        records = made.records
        assert made.program is not None
        result = runnable(made.program, piece.same, below)
    except (ContractError, UsageError):
        raise  # a count that was stated, or a mistake in it
    except CaptureError as error:
        return _as_it_came(str(error)), None
    except Exception as error:
        return _as_it_came(_told(error), records), None
    remarks = tuple(f"{remark.nodes[0]}: {remark.reason}." for remark in result.remarks)
    return replace(made, notes=(*made.notes, *remarks)), result.module


def _as_it_came(why: str, records: tuple[Record, ...] = ()) -> Compiled:
    return Compiled(None, records, (f"A piece runs as it came: {why}",))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, InlayError) else f"{type(error).__name__}: {one_line(error)}."


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


def _transform(program: Program, steps: list[Step]) -> Compiled:
    """Every transform that can run; one that fails is left out, and the next gets the program as it was before."""
    unmet = _Unmet(frozenset(step.key for step in steps if step.transform.options.expect is None))
    instruments: list[Instrument] = [unmet, *tracing()]
    records: list[Record] = []
    notes: list[str] = []
    for step in steps:
        try:
            program, made = run(program, [_without_contract(step)], instruments)
        except TransformError as error:
            made = [_left_out(step, error)]
            notes.append(f"{step.key} is left out: {error}")
        records += made
    return Compiled(program, tuple(records), (*notes, *unmet.notes))


def _left_out(step: Step, error: TransformError) -> Record:
    each = step.transform
    remark = Remark(RemarkKind.REFUSED, each.name, each.name, str(error))
    return Record(step.key, each.name, each.stage.value, "failed", remarks=(remark,))


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
