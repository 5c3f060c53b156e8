"""Adapter for the metrics and hooks of torch's compiler. Only this file of the package imports its private modules.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import utils as dynamo
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.compiler._cache import CacheArtifactManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_MANY = 1 << 16
_LIMIT = "recompile limit exceeded"
_CACHES = {"inductor": "fxgraph_cache_", "aot_autograd": "autograd_cache_"}


@dataclass(frozen=True)
class CompiledFrame:
    """A Python frame that Dynamo compiled."""

    frame: str
    """Dynamo's frame number since the last reset."""
    name: str
    location: str
    """`file.py:line` of the function."""
    reason: str
    """The guards that failed, for a recompile; empty for the first compilation."""
    has_hit_limit: bool = False
    """The recompile limit is reached: calls that no compiled code serves run eagerly, without an error."""


@contextmanager
def record_compiles() -> Iterator[list[CompiledFrame]]:
    """Yield a list that contains the frames compiled within the context after it ends."""
    made: list[CompiledFrame] = []
    dynamo.set_compilation_metrics_limit(_MANY)
    before = len(dynamo.get_compilation_metrics())
    try:
        yield made
    finally:
        for each in dynamo.get_compilation_metrics()[before:]:
            frame, why = str(each.compile_id).partition("/")[0], (each.fail_reason or "").partition("\n")[0]
            if each.co_name is not None:  # a lazily compiled backward pass has no frame
                place = f"{each.co_filename}:{each.co_firstlineno}"
                made.append(CompiledFrame(frame, each.co_name, place, (each.recompile_reason or "").strip()))
            elif _LIMIT in why:
                made.append(CompiledFrame(frame, f"frame {frame}", "", why, has_hit_limit=True))
        dynamo.set_compilation_metrics_limit(dynamo.DEFAULT_COMPILATION_METRICS_LIMIT)


def graph_breaks() -> Counter[str]:
    """Return the reasons of graph breaks and their counts since process start."""
    found: Counter[str] = Counter()
    for reason, count in dynamo.counters["graph_break"].items():
        found[reason.splitlines()[0]] += count
    return found


def is_compiled(function: Any) -> bool:
    """Return whether `torch.compile` was already applied."""
    return hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")


@contextmanager
def disable_caches() -> Iterator[None]:
    """Disable the compile caches; a cached graph would skip the compiler stages."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


@contextmanager
def use_eager_random() -> Iterator[None]:
    """Make compiled code draw the same random numbers as eager code."""
    with inductor_config.patch(fallback_random=True):
        yield


def collect_sources(call: Callable[[], Any]) -> list[str]:
    """Reset the compiler, run `call`, and return the text of every file that Inductor writes."""
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(call)
    return sources


@contextmanager
def fresh_caches() -> Iterator[None]:
    """Use an empty folder for the compiler caches, without earlier artifacts."""
    from torch._inductor.utils import fresh_cache

    with ExitStack() as stack:
        stack.enter_context(CacheArtifactManager.with_fresh_cache())
        stack.enter_context(fresh_cache())
        # a precompiled header for the new folder takes longer to build than it saves
        stack.enter_context(inductor_config.patch(cpp_cache_precompile_headers=False))
        torch.compiler.reset()
        yield
    torch.compiler.reset()


def cache_counts() -> Counter[str]:
    """Return lookup counts of both caches since process start: `fxgraph_cache_hit`, `autograd_cache_miss`, …"""
    return Counter(
        {
            name: count
            for room, prefix in _CACHES.items()
            for name, count in dynamo.counters[room].items()
            if name.startswith(prefix)
        }
    )
