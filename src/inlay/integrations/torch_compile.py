"""The backend for `torch.compile(model, backend="inlay")`."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from inlay.config import resolve_config
from inlay.errors import CaptureError, ContractError, InlayError, TransformError, UsageError, one_line, suggest
from inlay.integrations.dynamo_graph import capture_dynamo_graph
from inlay.lowering.inner_backend import INNER_BACKENDS, build_inner_module, compile_with, is_restart
from inlay.program.remarks import Remark, RemarkKind
from inlay.transforms import Transform, TransformRecord, configure, run
from inlay.transforms.instruments import dump_instruments
from inlay.transforms.pass_manager import TransformStep
from inlay.transforms.structured_trace import trace_instruments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import fx

    from inlay.program.program import Program
    from inlay.transforms.pass_manager import Instrument

_LOG = logging.getLogger("inlay")
_GRAPHS = itertools.count()
"""Numbers of the graphs of this process; with INLAY_DUMP_GRAPHS_DIR each is dumped into a folder of its own."""
_WAIVER = "torch.compile compiles parts of a model"


@dataclass(frozen=True)
class CompiledGraph:
    """The result for one graph of torch.compile."""

    program: Program | None
    """The program after the transforms; None if the graph runs unmodified."""
    records: tuple[TransformRecord, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences: why a graph runs unmodified, which transform is not applied, which state is copied, which anchor has
    no match."""


@dataclass(frozen=True)
class _Options:
    inner_backend: str = "eager"
    config: Sequence[Path | str] = ()
    set: Sequence[str] = ()
    on_compiled: Callable[[CompiledGraph], None] | None = None


def inlay(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The backend. Options: `inner_backend` (`eager`, `aot_eager` or `inductor`), `config` (files), `set` (settings),
    `on_compiled` (called with a `CompiledGraph` for every graph).

    Every graph that torch can run is run. A transform that fails is not applied, and a graph that cannot be rewritten
    runs unmodified, both with a note. Invalid options and site counts that differ from `expect` are errors.

    >>> from inlay.integrations import inlay
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
    steps = configure(resolve_config(files=chosen.config, settings=chosen.set))
    made, rewritten = _rewrite(module, inputs, steps, chosen.inner_backend)
    if rewritten is not None:
        try:
            fast = compile_with(chosen.inner_backend, rewritten, inputs)
        except Exception as error:
            if is_restart(error):
                raise
            made = _unmodified(
                f"{chosen.inner_backend} cannot run the transformed graph: {_error_text(error)}", made.records
            )
        else:
            _report(made, chosen)
            return fast
    try:
        fast = compile_with(chosen.inner_backend, module, inputs)
    except Exception as error:
        if is_restart(error):
            raise
        fast = module.forward
        made = replace(
            made,
            notes=(*made.notes, f"A graph runs eagerly: {chosen.inner_backend} cannot run it: {_error_text(error)}"),
        )
    _report(made, chosen)
    return fast


def _rewrite(
    module: fx.GraphModule, inputs: Sequence[Any], steps: list[TransformStep], below: str
) -> tuple[CompiledGraph, fx.GraphModule | None]:
    """Return the transformed graph, or None if it runs unmodified. A graph that runs eagerly never fails here."""
    tensors = (*module.parameters(), *(each for each in inputs if isinstance(each, torch.Tensor)))
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return _unmodified("gradients are on, but transforms are for inference. Call it within torch.no_grad()."), None
    records: tuple[TransformRecord, ...] = ()
    try:
        piece = capture_dynamo_graph(module)
        made = _transform(piece.program, steps)
        records = made.records
        assert made.program is not None
        result = build_inner_module(made.program, piece.output_aliases, below)
    except (ContractError, UsageError):
        raise  # an `expect` that is not met or invalid
    except CaptureError as error:
        return _unmodified(str(error)), None
    except Exception as error:
        return _unmodified(_error_text(error), records), None
    remarks = tuple(f"{remark.nodes[0]}: {remark.reason}." for remark in result.remarks)
    return replace(made, notes=(*made.notes, *remarks)), result.module


def _unmodified(why: str, records: tuple[TransformRecord, ...] = ()) -> CompiledGraph:
    return CompiledGraph(None, records, (f"A graph runs unmodified: {why}",))


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, InlayError) else f"{type(error).__name__}: {one_line(error)}."


def _options(given: Mapping[str, Any] | None, mode: str | None) -> _Options:
    if mode is not None:
        raise UsageError(f"The backend has no mode {mode}.", 'Use options, such as {"inner_backend": "inductor"}.')
    known = _Options.__dataclass_fields__
    for name in given or {}:
        if name not in known:
            raise UsageError(f"The backend has no option {name}.", suggest(name, known) or f"Use {', '.join(known)}.")
    chosen = _Options(**(given or {}))
    if chosen.inner_backend not in INNER_BACKENDS:
        raise UsageError(f"There is no inner backend {chosen.inner_backend}.", f"Choose {' or '.join(INNER_BACKENDS)}.")
    return chosen


def _transform(program: Program, steps: list[TransformStep]) -> CompiledGraph:
    """Run the transforms. One that fails is not applied, and the next gets the program without it."""
    unmet = _UnmetContracts(frozenset(step.key for step in steps if step.transform.options.expect is None))
    dumps = dump_instruments(below=f"graph_{next(_GRAPHS):03d}")
    instruments: list[Instrument] = [unmet, *dumps, *trace_instruments()]
    records: list[TransformRecord] = []
    notes: list[str] = []
    for step in steps:
        try:
            program, made = run(program, [_waive_contract(step)], instruments)
        except TransformError as error:
            made = [_failure_record(step, error)]
            notes.append(f"{step.key} is not applied: {error}")
        records += made
    return CompiledGraph(program, tuple(records), (*notes, *unmet.notes))


def _failure_record(step: TransformStep, error: TransformError) -> TransformRecord:
    each = step.transform
    remark = Remark(RemarkKind.REFUSED, each.name, each.name, str(error))
    return TransformRecord(step.key, each.name, each.stage.value, "failed", remarks=(remark,))


def _waive_contract(step: TransformStep) -> TransformStep:
    """Waive the contract unless `expect` is set, because the rest of a pattern may be in another graph."""
    if step.transform.options.expect is not None:
        return step
    options = step.transform.options.model_copy(update={"expect": "any", "reason": _WAIVER})
    return TransformStep(step.key, type(step.transform)(options))


@dataclass
class _UnmetContracts:
    """An instrument that notes contracts that would fail for a whole model."""

    keys: frozenset[str]
    notes: list[str] = field(default_factory=list)
    _anchors: list[str] = field(default_factory=list)

    def before(self, transform: Transform, program: Program) -> None:
        counts = program.op_counts()
        self._anchors = [name for name in transform.anchors if counts.get(name)]

    def after(self, transform: Transform, program: Program, record: TransformRecord) -> None:
        if record.key in self.keys and record.status == "ran" and not record.sites and self._anchors:
            why = record.misses[0].reason if record.misses else "no node starts a match"
            self.notes.append(f"{record.key} matched nothing although there is {', '.join(self._anchors)}: {why}.")


def _report(made: CompiledGraph, options: _Options) -> None:
    for record in made.records:
        _LOG.info("inlay: %s", record.summary)
    for note in made.notes:
        _LOG.warning("inlay: %s", note)
    if options.on_compiled is not None:
        options.on_compiled(made)
