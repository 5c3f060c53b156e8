"""Adapter: Inductor's hook for graph passes after autograd and functionalization.

The compiler functionalises again after export, so what is decided before it is undone by it. `fix_functionalization`
therefore runs as `post_grad_custom_post_pass`: after the pattern matcher, which removes clones and so decides what
shares storage, and before `reinplace_inplaceable_ops` and `decompose_auto_functionalized`, which would decide about the
wrappers themselves. They find none: what stays is spelled out as a copy and a call. Inductor's own decision does not
look at the other arguments of a call (pytorch#198031) and lets an output become the input it was a copy of.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes, get_hash_for_files

from inlay.analysis import aliasing, auto_functionalized, liveness
from inlay.analysis.liveness import CopyReason
from inlay.lowering.state import defunctionalization
from inlay.lowering.state.defunctionalization import (
    FixReport,
    expand_auto_functionalized,
    fix_functionalization,
    report_all_copied,
)
from inlay.program import graphs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

_SOURCES = tuple(
    str(Path(str(each.__file__))) for each in (aliasing, defunctionalization, liveness, auto_functionalized, graphs)
)


class FixFunctionalization(CustomGraphPass):
    """`fix_functionalization` as a pass of Inductor, for any model.

    Give it to one compilation as `post_grad_custom_post_pass`, in the `options` of `torch.compile` or in the
    `inductor_configs` of `torch._inductor.aoti_compile_and_package`; `in_place_writes` sets it for a while.
    """

    def __init__(self) -> None:
        self.reports: list[FixReport] = []
        """One entry a graph; a graph that comes out of Inductor's cache is not compiled and has none."""

    def __call__(self, graph: fx.Graph) -> None:
        """Decide about every wrapper, and spell out what stays."""
        if _has_collective_reordering():
            self.reports.append(report_all_copied(graph, CopyReason.REORDERED_CALLS))
            return
        fixed = fix_functionalization(graph)
        expand_auto_functionalized(graph)
        for node in graph.nodes:
            # Inductor numbers the regions between writes once, and there are more of them now.
            node.meta.pop("mutation_region_id", None)
        self.reports.append(fixed)

    def __deepcopy__(self, memo: object) -> FixFunctionalization:
        """Itself: Inductor copies its configuration ahead of time, and the reports belong to whoever asked."""
        return self

    def uuid(self) -> bytes:
        """The source of the pass: Inductor's cache keeps results of different sources apart."""
        return get_hash_for_files((__file__, *_SOURCES))


def _has_collective_reordering() -> bool:
    """Whether passes that gather or reorder collectives follow; they take a graph without writes for granted."""
    buckets = (config.bucket_all_gathers_fx, config.bucket_all_reduces_fx, config.bucket_reduce_scatters_fx)
    overlap = config.aten_distributed_optimizations.enable_overlap_scheduling
    return bool(overlap) or any(each != "none" for each in buckets)


@contextmanager
def in_place_writes() -> Iterator[list[FixReport]]:
    """Within this context what Inductor compiles goes through `fix_functionalization`; yields the reports.

    `torch.compile` compiles when the function is first called, so the first call has to be in the context.
    """
    added = FixFunctionalization()
    passes = (*get_custom_graph_passes(config.post_grad_custom_post_pass), added)
    with config.patch(post_grad_custom_post_pass=passes):
        yield added.reports
