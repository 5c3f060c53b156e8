"""Caching: artifacts of one process serve the next, and nothing they are not for."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tools.fuzz_writes import operators  # noqa: F401 - registers torch.ops.inlay_fuzz
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from inlay.testing import assert_no_recompiles, cache_round_trip, generated_code, post_grad_graphs
from inlay.testing.compiler import cache_counts, fresh_caches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import fx

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x.t()


def guarded(x: torch.Tensor) -> torch.Tensor:
    """The same graph on both sides of a size; what differs is only the guard."""
    assert x.shape[0] > 4 or x.shape[1] > 2
    return x @ x.t()


def test_misses_then_hits() -> None:
    trip = cache_round_trip(product, torch.ones(3, 4))
    assert (trip.cold.hits, trip.cold.misses) == (0, 2), "Inductor's cache, and that of autograd above it"
    assert (trip.warm.hits, trip.warm.misses) == (2, 0)
    assert trip.other is None


class Counts(torch.nn.Module):
    """A model with state: what it gives depends on how often it was called."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3, 3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.inlay_fuzz.put(self.total, x)
        return self.total @ self.total


def test_every_call_begins_with_the_same_state() -> None:
    model, given = Counts(), (torch.ones(4, dtype=torch.int64),)
    assert cache_round_trip(model, given).warm.misses == 0
    assert_no_recompiles(model, given)
    assert post_grad_graphs(model, given)
    assert generated_code(model, given).external_kernels["inlay_fuzz.put"] == 1
    assert not model.total.any()


def test_an_empty_cache_has_no_hits() -> None:
    """The control: without the artifacts the second call is a miss as well."""
    for _ in range(2):
        with fresh_caches():
            before = cache_counts()
            torch.compile(product)(torch.ones(3, 4))
            assert cache_counts() - before == {
                "fxgraph_cache_miss": 1,
                "autograd_cache_miss": 1,
                "autograd_cache_saved": 1,
            }


def test_guards_that_diverge_give_a_fresh_compile() -> None:
    """The graph is the same and so is its key: the entry is found, and its guard on the size does not hold."""
    trip = cache_round_trip(guarded, torch.ones(8, 4), other_inputs=torch.ones(3, 4), dynamic=True)
    assert trip.other is not None
    assert trip.other.guard_misses == 1
    assert (trip.other.hits, trip.other.misses) == (0, 2)


def test_inputs_that_do_not_diverge() -> None:
    with pytest.raises(AssertionError, match="diverging inputs were served from the cache"):
        cache_round_trip(guarded, torch.ones(8, 4), other_inputs=torch.ones(9, 4), dynamic=True)


def test_code_that_is_used_for_what_it_is_not_for() -> None:
    """Torch's own switch for not looking at the guards of what is cached."""
    with (
        config.patch(unsafe_skip_cache_dynamic_shape_guards=True),
        pytest.raises(AssertionError, match="diverging inputs were served from the cache"),
    ):
        cache_round_trip(guarded, torch.ones(8, 4), other_inputs=torch.ones(3, 4), dynamic=True)


class _Pass(CustomGraphPass):
    """A pass that changes nothing."""

    def __init__(self, identity: Any) -> None:
        self.identity = identity

    def __call__(self, graph: fx.Graph) -> None:
        pass

    def uuid(self) -> Any:
        return self.identity


class _Restless(_Pass):
    def uuid(self) -> Any:
        self.identity += "again "
        return self.identity


def test_a_cache_that_never_hits() -> None:
    """A pass that calls itself something else each time."""
    options = {"post_grad_custom_post_pass": _Restless("")}
    with pytest.raises(AssertionError, match="No graph was found in the loaded artifacts"):
        cache_round_trip(product, torch.ones(3, 4), options=options)
    cache_round_trip(product, torch.ones(3, 4), options={"post_grad_custom_post_pass": _Pass("always")})


def test_graphs_that_cannot_be_cached() -> None:
    options = {"post_grad_custom_post_pass": _Pass(None)}
    with pytest.raises(AssertionError, match=r"cannot be cached\. TORCH_LOGS"):
        cache_round_trip(product, torch.ones(3, 4), options=options)


def test_what_inlay_hands_down_is_not_cached() -> None:
    """A limit that docs/stages.md states. When this fails, it is gone: say so there."""
    with pytest.raises(AssertionError, match="1 graphs cannot be cached"):
        cache_round_trip(product, torch.ones(3, 4), backend="inlay", options={"inner_backend": "inductor"})


def test_no_cache_at_all() -> None:
    with pytest.raises(AssertionError, match="Nothing was looked up"):
        cache_round_trip(product, torch.ones(3, 4), backend="eager")


@pytest.mark.nightly
def test_another_process_hits(tmp_path: Path) -> None:
    """All three processes are new: settings that other tests leave behind would be part of the key."""
    (tmp_path / "model.py").write_text(_MODEL)
    (tmp_path / "save.py").write_text(_SAVE)
    (tmp_path / "load.py").write_text(_LOAD)
    for command, expected in ((["save.py"], []), (["load.py", "no"], ["0", "2"]), (["load.py", "yes"], ["2", "0"])):
        made = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True
        )
        assert made.stdout.split() == expected, made.stdout + made.stderr


_MODEL = """
def product(x):
    return x @ x.t()
"""
_SAVE = """
from pathlib import Path
import torch
from inlay.testing import cache_round_trip
from model import product

Path("artifacts").write_bytes(cache_round_trip(product, torch.ones(3, 4)).artifacts)
"""
_LOAD = """
import sys, torch
from pathlib import Path
from inlay.testing.compiler import cache_counts, fresh_caches
from model import product

with fresh_caches():
    if sys.argv[1] == "yes":
        torch.compiler.load_cache_artifacts(Path("artifacts").read_bytes())
    torch.compile(product)(torch.ones(3, 4))
    made = cache_counts()
    print(*(made[f"fxgraph_cache_{what}"] + made[f"autograd_cache_{what}"] for what in ("hit", "miss")))
"""
