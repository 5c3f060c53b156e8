"""Measured times of candidates: each kernel of one occurrence runs alone on random inputs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.insight.candidates.candidate import Candidate, CandidateSearch, rank
from inlay.insight.candidates.op_kinds import OpKind, is_kernel, op_kind
from inlay.insight.candidates.region import ConcreteSizes, FusionRegion

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 30
_WARM = 3


@dataclass(frozen=True)
class Measurement:
    """Seconds over all occurrences, for one row, run eagerly."""

    seconds: float
    """All kernels of the region."""
    savings: float
    """Upper bound of the savings: all but the slowest kernel. A GEMM reads its weights anyway and saves one launch."""
    threads: int


def measure(search: CandidateSearch, on_step: Callable[[str], None] = lambda step: None) -> CandidateSearch:
    """Return the candidates with measured times, ranked by measured savings."""
    launch = _time_call(torch.ops.aten.neg.default, (torch.ones(1),), {})
    sizes = ConcreteSizes(search.program, 1)
    timed = []
    for candidate in search.candidates:
        on_step(f"measuring {candidate.name}")
        timed.append(replace(candidate, measurement=_measure(candidate, sizes, launch)))
    return replace(search, candidates=rank(timed))


def _measure(candidate: Candidate, sizes: ConcreteSizes, launch: float) -> Measurement:
    times = _kernel_times(candidate.regions[0], sizes)
    heavy = [seconds for node, seconds in times.items() if op_kind(node) in (OpKind.GEMM, OpKind.ATTENTION)]
    light = [seconds for node, seconds in times.items() if op_kind(node) not in (OpKind.GEMM, OpKind.ATTENTION)]
    count = len(candidate.regions)
    if heavy:
        shared = candidate.family == "shared input"
        saved = sum(light) + (len(heavy) - 1) * launch * shared
    else:
        saved = sum(light) - max(light, default=0.0)
    return Measurement(count * (sum(light) + sum(heavy)), count * saved, torch.get_num_threads())


def _kernel_times(region: FusionRegion, sizes: ConcreteSizes) -> dict[fx.Node, float]:
    generator = torch.Generator().manual_seed(0)
    values: dict[fx.Node, Any] = {}
    times: dict[fx.Node, float] = {}

    def given(node: fx.Node) -> Any:
        if node not in values:
            values[node] = _random(node.meta.get("val"), sizes, generator)
        return values[node]

    with torch.no_grad():
        for node in region.nodes:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), given)
            target: Any = node.target
            values[node] = target(*args, **kwargs)
            if is_kernel(node):
                times[node] = _time_call(target, args, kwargs)
    return times


def _time_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the shortest of several runs, which other load on the machine disturbs least."""
    found = []
    for _ in range(_WARM + _ROUNDS):
        start = time.perf_counter()
        target(*args, **kwargs)
        found.append(time.perf_counter() - start)
    return min(found[_WARM:])


def _random(value: Any, sizes: ConcreteSizes, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return sizes.dim(value) if isinstance(value, torch.SymInt) else value
    shape = sizes.shape(value)
    if value.is_floating_point():
        return torch.randn(shape, generator=generator).to(value.dtype)
    return torch.randint(0, 2, shape, generator=generator).to(value.dtype)
