"""Adapter: what torch's compiler tells of itself while it works. The only file of this room that imports it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._dynamo import utils as dynamo
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.compiler._cache import CacheArtifactManager

from inlay.program.graphs import copy_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import fx

_MANY = 1 << 16
_LIMIT = "recompile limit exceeded"
_CACHES = {"inductor": "fxgraph_cache_", "aot_autograd": "autograd_cache_"}


@dataclass(frozen=True)
class CompiledFrame:
    """A frame of Python that Dynamo compiled."""

    frame: str
    """Which code it is, counted from the last reset."""
    name: str
    location: str
    """`file.py:line` of the function."""
    reason: str
    """The guards that failed, where the code had been compiled before; empty the first time."""
    has_hit_limit: bool = False
    """Compiled too often already: from now on what no compiled code serves runs eagerly, and nobody is told."""


@contextmanager
def record_compiles() -> Iterator[list[CompiledFrame]]:
    """Fills the list with what was compiled within the context, when it ends."""
    made: list[CompiledFrame] = []
    dynamo.set_compilation_metrics_limit(_MANY)
    before = len(dynamo.get_compilation_metrics())
    try:
        yield made
    finally:
        for each in dynamo.get_compilation_metrics()[before:]:
            frame, why = str(each.compile_id).partition("/")[0], (each.fail_reason or "").partition("\n")[0]
            if each.co_name is not None:  # a backward pass that is compiled later has no frame
                place = f"{each.co_filename}:{each.co_firstlineno}"
                made.append(CompiledFrame(frame, each.co_name, place, (each.recompile_reason or "").strip()))
            elif _LIMIT in why:
                made.append(CompiledFrame(frame, f"frame {frame}", "", why, has_hit_limit=True))
        dynamo.set_compilation_metrics_limit(dynamo.DEFAULT_COMPILATION_METRICS_LIMIT)


def graph_breaks() -> Counter[str]:
    """Why Dynamo cut a function in two, and how often, since the process began."""
    found: Counter[str] = Counter()
    for reason, count in dynamo.counters["graph_break"].items():
        found[reason.splitlines()[0]] += count
    return found


def is_compiled(function: Any) -> bool:
    """Whether `torch.compile` has been here already."""
    return hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")


@contextmanager
def disable_caches() -> Iterator[None]:
    """Everything is compiled: a graph that comes out of a cache passes through no stage."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


@contextmanager
def use_eager_random() -> Iterator[None]:
    """Compiled code draws the numbers that eager code draws."""
    with inductor_config.patch(fallback_random=True):
        yield


@contextmanager
def record_post_grad_graphs() -> Iterator[list[fx.Graph]]:
    """Collects every graph that Inductor makes code of, as it is after the last of the post-grad passes."""
    from torch._inductor import compile_fx

    passes = compile_fx._recursive_post_grad_passes
    made: list[fx.Graph] = []
    depth = 0

    def noted(module: fx.GraphModule, is_inference: bool = False) -> None:
        nonlocal depth
        depth += 1
        try:
            passes(module, is_inference)
        finally:
            depth -= 1
        if depth == 0:  # branches and bodies of loops hang from the graph that calls them
            made.append(copy_graph(module.graph))

    with mock.patch.object(compile_fx, "_recursive_post_grad_passes", noted):
        yield made


def collect_sources(call: Callable[[], Any]) -> list[str]:
    """Run `call` from a reset compiler; the text of every file that Inductor writes."""
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(call)
    return sources


@contextmanager
def fresh_caches() -> Iterator[None]:
    """An empty folder for the caches of the compiler, and no artifacts remembered from before."""
    from torch._inductor.utils import fresh_cache

    with ExitStack() as stack:
        stack.enter_context(CacheArtifactManager.with_fresh_cache())
        stack.enter_context(fresh_cache())
        # the folder would get a precompiled header of its own, which takes longer than what it saves
        stack.enter_context(inductor_config.patch(cpp_cache_precompile_headers=False))
        torch.compiler.reset()
        yield
    torch.compiler.reset()


def cache_counts() -> Counter[str]:
    """Lookups of graphs in both caches since the process began: `fxgraph_cache_hit`, `autograd_cache_miss`, …"""
    return Counter(
        {
            name: count
            for room, prefix in _CACHES.items()
            for name, count in dynamo.counters[room].items()
            if name.startswith(prefix)
        }
    )
