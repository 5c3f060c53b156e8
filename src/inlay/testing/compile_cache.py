"""`cache_round_trip`: save compile-cache artifacts and load them into an empty cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from inlay.testing.compiler import cache_counts, fresh_caches
from inlay.testing.inputs import call, compile_model, copy_inputs, copy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inlay.testing.inputs import Inputs, Model


@dataclass(frozen=True)
class CacheCounts:
    """Lookups of the graphs of one call in the Inductor cache and the AOTAutograd cache."""

    hits: int
    misses: int
    bypasses: int
    """Graphs that cannot be cached."""
    guard_misses: int
    """Misses where an entry existed but its shape guards failed."""


@dataclass(frozen=True)
class RoundTrip:
    """The cache counts of the same call with an empty cache and with loaded artifacts."""

    cold: CacheCounts
    warm: CacheCounts
    other: CacheCounts | None
    artifacts: bytes
    """Input for `torch.compiler.load_cache_artifacts`, in any process."""


def cache_round_trip(
    model: Model,
    inputs: Inputs,
    *,
    other_inputs: Inputs | None = None,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> RoundTrip:
    """Assert that saved artifacts avoid compilation: misses first, only hits after loading, and the same values.

    Each call starts with a reset compiler and an empty cache folder. `other_inputs` is a second set of inputs that must
    miss the loaded cache. It is compiled again, and its results must equal eager results.

    >>> trip = cache_round_trip(lambda x: x @ x, torch.ones(2, 2), other_inputs=torch.ones(3, 3))
    >>> trip.cold.misses > 0, trip.warm.hits > 0, trip.warm.misses, trip.other.misses > 0
    (True, True, 0, True)
    """

    def looked_up(given: Inputs) -> tuple[CacheCounts, Any]:
        torch.compiler.reset()
        before = cache_counts()
        value = call(compile_model(copy_model(model), backend, options, dynamic), copy_inputs(given))
        return _lookups(cache_counts() - before), value

    with fresh_caches():
        cold, first = looked_up(inputs)
        saved = torch.compiler.save_cache_artifacts()
    assert not cold.bypasses, f"{cold.bypasses} graphs cannot be cached. {_REMEDY}"
    assert cold.misses, f"Nothing was looked up in the caches: {cold}. {_REMEDY}"
    assert not cold.hits, f"An empty cache was hit: {cold}."
    assert saved is not None, f"{cold.misses} graphs were compiled, but none was cached. {_REMEDY}"
    with fresh_caches():
        torch.compiler.load_cache_artifacts(saved[0])
        warm, second = looked_up(inputs)
        other = None if other_inputs is None else looked_up(other_inputs)
    assert warm.hits, f"No graph was found in the loaded artifacts: {warm}. {_REMEDY}"
    assert not warm.misses, f"{warm.misses} graphs were recompiled although artifacts were loaded. {_REMEDY}"
    _assert_same(first, second, "from the cache")
    if other_inputs is None or other is None:
        return RoundTrip(cold, warm, None, saved[0])
    assert other[0].misses, (
        f"The diverging inputs were served from the cache: {other[0]}. "
        "Either their guards hold for both sets, so that they do not diverge, or the cached code is wrong for them."
    )
    _assert_same(call(copy_model(model), copy_inputs(other_inputs)), other[1], "for the diverging inputs", 1e-4)
    return RoundTrip(cold, warm, other[0], saved[0])


_REMEDY = 'TORCH_LOGS="+inductor,+aot" logs the reason; common ones are a pass without a uuid and a mutable option.'


def _lookups(counts: Mapping[str, int]) -> CacheCounts:
    def both(what: str) -> int:
        return sum(counts.get(f"{room}_cache_{what}", 0) for room in ("fxgraph", "autograd"))

    return CacheCounts(both("hit"), both("miss"), both("bypass"), counts.get("autograd_cache_guard_miss", 0))


def _assert_same(one: Any, two: Any, where: str, tolerance: float = 0.0) -> None:
    for left, right in zip(tree_leaves(one), tree_leaves(two), strict=True):
        if isinstance(left, torch.Tensor):
            torch.testing.assert_close(
                right, left, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{where}: {text}"
            )
        else:
            assert left == right, f"{where}: {right!r} instead of {left!r}"
