"""State in arguments: the caller owns the cache, and a step writes new rows to it.

    python examples/aliased_io_user_inputs.py
    python examples/aliased_io_user_inputs.py --backend aot

The first model writes to its argument, which is detected. The second model returns a new state; with
`alias={"new_state": "state"}` the caller declares that it uses the storage of the old state. An alias that is not
possible is rejected.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from showing import PAGE_SIZE, check, check_in_place, measure, parse_backend, print_bindings
from torch import Tensor, nn

from inlay import Example
from inlay.errors import UsageError
from inlay.frontend import capture
from inlay.lowering.compiled_program import compile_program
from inlay.package.memory_profiler import allocate_paged

if TYPE_CHECKING:
    from inlay import Program

SHAPE = (1, 4, 1024, 64)
"""[batch, kv_heads, max_len, head_dim]"""


class Append(nn.Module):
    """Writes a row at a position and returns the mean of all rows."""

    def forward(self, cache: Tensor, row: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(2, at, row)
        return cache.mean(2)


class Decay(nn.Module):
    """Computes a new state from the old one at every step."""

    def forward(self, state: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"new_state": 0.5 * state + x, "largest": x.max()}


def check_recognized_alias(name: str) -> bool:
    print("# The model writes to a cache argument\n")
    model, row = Append(), torch.randn(1, 4, 1, 64)
    program = capture(Example(model, (torch.zeros(SHAPE), row, torch.tensor([0]))))
    step = compile_program(program, name)
    print_bindings(step)

    cache, expected = allocate_paged(SHAPE), torch.zeros(SHAPE)
    address, same = cache.data_ptr(), True
    for position in range(8):
        row, at = torch.randn(1, 4, 1, 64), torch.tensor([position])
        wanted = model(expected, row, at)
        same &= torch.allclose(step(cache, row, at), wanted, atol=1e-6)
    same &= torch.equal(cache, expected)
    moved = measure("cache", lambda: step(cache, row, at), cache)
    return all(
        [
            check_in_place(step),
            check("only the pages of the new row are written", 0 < moved.written_bytes <= 4 * PAGE_SIZE),
            check("nothing as large as the cache is copied", moved.copied_bytes(cache.nbytes) == 0),
            check("the address of the cache is unchanged", cache.data_ptr() == address),
            check("8 steps equal eager PyTorch, cache included", same),
        ]
    )


def check_declared_alias(name: str) -> bool:
    print("\n# The model returns a new state; the caller declares its storage\n")
    model = Decay()
    program = capture(Example(model, (torch.zeros(SHAPE), torch.ones(SHAPE))))
    step = compile_program(program, name, alias={"new_state": "state"})
    print_bindings(step)

    state, x, expected = allocate_paged(SHAPE), torch.randn(SHAPE), torch.zeros(SHAPE)
    for _ in range(8):
        returned = step(state, x)["new_state"]
        expected = model(expected, x)["new_state"]
    same = torch.allclose(state, expected)
    moved = measure("state", lambda: step(state, x), state)
    return all(
        [
            check_in_place(step),
            check("the whole state is new at every step, without a second one", moved.copied_bytes(state.nbytes) == 0),
            check("the step returns the state itself", returned is state),
            check("8 steps equal eager PyTorch", same),
            check_refused_alias(program, name),
        ]
    )


def check_refused_alias(program: Program, name: str) -> bool:
    print("\n# An impossible alias\n")
    try:
        compile_program(program, name, alias={"largest": "state"})
    except UsageError as error:
        print(error)
        return check("it is rejected", True)
    return check("it is rejected", False)


def main(arguments: list[str] | None = None) -> int:
    name = parse_backend(__doc__, arguments)
    torch.manual_seed(0)
    with torch.no_grad():
        return 0 if check_recognized_alias(name) & check_declared_alias(name) else 1


if __name__ == "__main__":
    sys.exit(main())
