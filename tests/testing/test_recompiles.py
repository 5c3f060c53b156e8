"""Capture and guards: one compiled function serves many inputs, and a guard that fails is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.testing import CompileCounts, assert_no_recompiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.testing.inputs import Inputs

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def scaled(x: torch.Tensor, factor: Any) -> torch.Tensor:
    return torch.relu(x) * factor


def rows(*sizes: int, factor: Any = 2) -> list[Any]:
    return [(torch.randn(size, 4), factor) for size in sizes]


def test_the_same_sizes_are_compiled_once() -> None:
    assert assert_no_recompiles(scaled, rows(3, 3, 3), backend="eager") == CompileCounts(1, 0, 0)


def test_one_set_is_given_twice() -> None:
    assert assert_no_recompiles(scaled, rows(3)[0], backend="eager").frames == 1


def test_a_size_that_changes_is_named() -> None:
    with pytest.raises(AssertionError, match=r"scaled .*test_recompiles.py:\d+.*tensor 'x' size mismatch at index 0"):
        assert_no_recompiles(scaled, rows(3, 5), backend="eager")


def test_dynamic_sizes_are_compiled_once() -> None:
    assert assert_no_recompiles(scaled, rows(3, 5, 7), backend="eager", dynamic=True) == CompileCounts(1, 0, 0)


def test_a_size_is_known_to_change_after_the_second() -> None:
    made = assert_no_recompiles(scaled, rows(3, 5, 7), backend="eager", warmup=2)
    assert made == CompileCounts(1, 1, 0), "static, then dynamic"
    made = assert_no_recompiles(scaled, rows(3, 5, 7), backend="eager", warmup=2, stance="eager_then_compile")
    assert made == CompileCounts(1, 0, 0), "the first call compiles nothing, so there is nothing to compile again"


def test_a_number_that_changes_is_named() -> None:
    inputs: list[Inputs] = [(torch.ones(2), factor) for factor in (1, 2)]
    with pytest.raises(AssertionError, match=r"factor == 1"):
        assert_no_recompiles(scaled, inputs, backend="eager", dynamic=False)
    tensors: list[Inputs] = [(torch.ones(2), torch.tensor(factor)) for factor in (1, 2)]
    assert_no_recompiles(scaled, tensors, backend="eager", dynamic=False)


def test_the_stance_that_fails_says_the_same() -> None:
    with pytest.raises(AssertionError, match=r"(?s)would be recompiled.*inputs 1.*scaled.*size mismatch"):
        assert_no_recompiles(scaled, rows(3, 5), backend="eager", stance="fail_on_recompile")
    assert assert_no_recompiles(scaled, rows(3, 3), backend="eager", stance="fail_on_recompile").frames == 1


def test_other_errors_are_not_taken_for_a_recompile() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        return x.view(6)

    with pytest.raises(RuntimeError, match="shape"):
        assert_no_recompiles(picky, [(torch.ones(6),), (torch.ones(5),)], backend="eager")


def test_what_runs_eagerly_for_being_compiled_too_often_is_not_taken_for_good() -> None:
    """Dynamo gives up after eight recompiles and says so in a log: no later call is compiled, or counted."""
    inputs: list[Inputs] = [(torch.ones(2), factor) for factor in range(12)]
    with pytest.raises(AssertionError, match="reaches the recompile limit"):
        assert_no_recompiles(scaled, inputs, backend="eager", dynamic=False, warmup=10)


def test_a_branch_that_the_warmup_does_not_reach() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def outer(x: torch.Tensor, deep: bool) -> torch.Tensor:
        torch._dynamo.graph_break()
        return inner(x) if deep else x

    inputs: list[Inputs] = [(torch.ones(2), False), (torch.ones(2), True)]
    with pytest.raises(AssertionError, match="after the warm-up"):
        assert_no_recompiles(outer, inputs, backend="eager")


def test_graph_breaks_are_counted_and_bounded() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    assert assert_no_recompiles(broken, (torch.ones(2),), backend="eager") == CompileCounts(2, 0, 1)
    with pytest.raises(AssertionError, match=r"1 graph breaks:\n +Call to `torch._dynamo.graph_break\(\)`"):
        assert_no_recompiles(broken, (torch.ones(2),), backend="eager", max_graph_breaks=0)


def test_nothing_compiled_is_nothing_checked() -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(AssertionError, match="Nothing was compiled"):
        assert_no_recompiles(torch.compiler.disable(scaled), rows(3, 5), backend="eager")
    with pytest.raises(UsageError, match="The stance force_eager does not compile"):
        assert_no_recompiles(scaled, rows(3, 5), stance="force_eager")


def test_wrong_calls_say_what_to_do() -> None:
    with pytest.raises(UsageError, match="The warm-up uses all 2 sets of inputs"):
        assert_no_recompiles(scaled, rows(3, 3), warmup=2)
    with pytest.raises(UsageError, match="There are no inputs"):
        assert_no_recompiles(scaled, [])
    with pytest.raises(UsageError, match="A set of inputs is a int"):
        assert_no_recompiles(scaled, [3])  # type: ignore[list-item]


def test_what_is_compiled_already_is_taken_as_it_is() -> None:
    seen: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        seen.append(len(inputs))
        return module.forward

    assert_no_recompiles(torch.compile(scaled, backend=backend), rows(3, 3))
    assert len(seen) == 1
    assert_no_recompiles(torch.compile(torch.nn.Linear(4, 4), backend=backend), (torch.ones(3, 4),))
    assert len(seen) == 2
