"""Runtime: a compiled step writes to its state where it is, and to no more of it than the model does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.frontend import Example, capture
from inlay.lowering.compiled_program import compile_program
from inlay.testing import StateTraffic, assert_in_place

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.fast
ROWS, WIDTH = 64, 1024  # a row is a page, so that every row is told apart
SIZE = ROWS * WIDTH * 4


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.zeros(ROWS, WIDTH), torch.randn(1, WIDTH), torch.tensor([5])


def append(cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(0, at, row)
    return cache[:8].sum(0)


def scattered(cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> None:
    cache.scatter_(0, at.expand(1, WIDTH), row)


class Holds(torch.nn.Module):
    """A module that owns its cache."""

    layer: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.register_buffer("cache", torch.zeros(ROWS, WIDTH))

    def forward(self, row: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.layer.cache.index_copy_(0, at, row)
        return self.layer.cache[:8].sum(0)


class Replaces(Holds):
    """And one that makes another instead."""

    def forward(self, row: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.layer.cache = self.layer.cache.index_copy(0, at, row)
        return row.sum()


def test_an_input() -> None:
    assert assert_in_place(append, inputs(), state=0) == StateTraffic(SIZE, 4096, 4096)


def test_a_buffer() -> None:
    _, row, at = inputs()
    assert assert_in_place(Holds(), {"row": row, "at": at}, state="layer.cache") == StateTraffic(SIZE, 4096, 4096)


def test_inductor_copies_the_state_for_a_scatter_and_inlay_does_not() -> None:
    with pytest.raises(AssertionError, match=rf"allocates {SIZE} bytes in blocks as large as the state .* is copied"):
        assert_in_place(scattered, inputs(), state=0)
    made = assert_in_place(scattered, inputs(), state=0, backend="inlay", options={"inner_backend": "inductor"})
    assert made.bytes_written == 4096


def test_a_step_compiled_elsewhere() -> None:
    class Module(torch.nn.Module):
        def forward(self, cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return append(cache, row, at)

    step = compile_program(capture(Example(Module(), inputs())), "eager")
    assert assert_in_place(append, inputs(), state=0, step=step).bytes_written == 4096
    with pytest.raises(UsageError, match="Give the state as an input"):
        assert_in_place(Holds(), {"row": inputs()[1], "at": inputs()[2]}, state="layer.cache", step=step)


def _backend(run: Any) -> Any:
    return lambda module, _: lambda *args: run(module, args)


def copies_back_in_parts(module: Any, args: Any) -> Any:
    """All of the state is written, in parts that are each smaller than it."""
    cache = next(each for each in args if each.shape == (ROWS, WIDTH))
    made = module(*args)
    for part in cache.split(8):
        part.copy_(part.clone())
    return made


def forgets(module: Any, args: Any) -> Any:
    return module(*(each.clone() for each in args))


def test_more_than_the_update_is_written() -> None:
    with pytest.raises(
        AssertionError, match=rf"writes to {SIZE} bytes of the state's pages, but only 4096 are needed: the whole state"
    ):
        assert_in_place(append, inputs(), state=0, backend=_backend(copies_back_in_parts))


def test_the_state_is_not_written() -> None:
    def small(module: Any, args: Any) -> Any:
        """Runs on a part of the cache that is a copy, smaller than the state."""
        return module(*(each[:8].clone() if each.shape == (ROWS, WIDTH) else each for each in args))

    with pytest.raises(AssertionError, match="copied"):
        assert_in_place(append, inputs(), state=0, backend=_backend(forgets))
    with pytest.raises(AssertionError, match="does not write to the state 0"):
        assert_in_place(append, inputs(), state=0, backend=_backend(small))


def test_other_values_are_written() -> None:
    def wrong(module: Any, args: Any) -> Any:
        made = module(*args)
        args[0][5, 7] += 1
        return made

    with pytest.raises(AssertionError, match=r"(?s)The state 0 afterwards: .*Greatest absolute difference"):
        assert_in_place(append, inputs(), state=0, backend=_backend(wrong))


def test_a_state_that_is_replaced() -> None:
    with pytest.raises(AssertionError, match=r"layer.cache is another tensor after the step"):
        assert_in_place(Replaces(), inputs()[1:], state="layer.cache", backend="eager")


def test_what_is_enough_can_be_said() -> None:
    def two(cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> None:
        cache.index_copy_(0, at, row)
        cache.index_copy_(0, at + 1, row)

    assert assert_in_place(two, inputs(), state=0, backend="eager", max_bytes=8192).bytes_written == 8192
    with pytest.raises(AssertionError, match="more than the update is written"):
        assert_in_place(two, inputs(), state=0, backend="eager", max_bytes=4096)


def test_nothing_compiled_is_nothing_checked() -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(AssertionError, match="Nothing was compiled"):
        assert_in_place(append, inputs(), state=0)


def test_wrong_calls_say_what_to_do() -> None:
    with pytest.raises(UsageError, match="already compiled"):
        assert_in_place(torch.compile(append), inputs(), state=0)
    with pytest.raises(UsageError, match=r"There is no state layer.cahce. Did you mean layer.cache\?"):
        assert_in_place(Holds(), inputs()[1:], state="layer.cahce")
    with pytest.raises(UsageError, match="The model does not write to 1"):
        assert_in_place(append, inputs(), state=1, backend="eager")
    with pytest.raises(UsageError, match="not a contiguous tensor"):
        assert_in_place(append, (inputs()[0].t(), *inputs()[1:]), state=0)
