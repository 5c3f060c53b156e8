"""Adapter: Inductor's hook for graph passes after autograd and functionalization.

Inductor functionalizes again after export, which would undo earlier decisions. `fix_functionalization` therefore runs
as `post_grad_custom_post_pass`. It runs after the pattern matcher, which removes clones and so decides which values
share storage. It runs before `reinplace_inplaceable_ops` and `decompose_auto_functionalized`, which would decide about
the wrappers. They find none, because remaining wrappers are expanded to a copy and a call. Inductor's decision ignores
the other arguments of a call (pytorch#198031) and lets an output become the input that it was a copy of.
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

    Pass it to one compilation as `post_grad_custom_post_pass`, in the `options` of `torch.compile` or in the
    `inductor_configs` of `torch._inductor.aoti_compile_and_package`; `in_place_writes` sets it within a context.
    """

    def __init__(self) -> None:
        self.reports: list[FixReport] = []
        """One entry per compiled graph; a graph from Inductor's cache is not compiled and has none."""

    def __call__(self, graph: fx.Graph) -> None:
        """Decide about every wrapper, and expand the remaining ones."""
        if _has_collective_reordering():
            self.reports.append(report_all_copied(graph, CopyReason.REORDERED_CALLS))
            return
        fixed = fix_functionalization(graph)
        expand_auto_functionalized(graph)
        for node in graph.nodes:
            # Inductor numbers the regions between writes only once, and the new writes add regions.
            node.meta.pop("mutation_region_id", None)
        self.reports.append(fixed)

    def __deepcopy__(self, memo: object) -> FixFunctionalization:
        """Return itself. Inductor copies its configuration, but the reports must go to the original object."""
        return self

    def uuid(self) -> bytes:
        """Return a hash of the pass's source, which is part of the key of Inductor's cache."""
        return get_hash_for_files((__file__, *_SOURCES))


def _has_collective_reordering() -> bool:
    """Return whether passes that bucket or reorder collectives follow. They assume a graph without writes."""
    buckets = (config.bucket_all_gathers_fx, config.bucket_all_reduces_fx, config.bucket_reduce_scatters_fx)
    overlap = config.aten_distributed_optimizations.enable_overlap_scheduling
    return bool(overlap) or any(each != "none" for each in buckets)


@contextmanager
def in_place_writes() -> Iterator[list[FixReport]]:
    """Apply `fix_functionalization` to all graphs that Inductor compiles in this context; yields the reports.

    `torch.compile` compiles when the function is first called, so the first call must be in the context.
    """
    added = FixFunctionalization()
    passes = (*get_custom_graph_passes(config.post_grad_custom_post_pass), added)
    with config.patch(post_grad_custom_post_pass=passes):
        yield added.reports
