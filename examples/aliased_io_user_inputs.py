"""The caller owns the cache: it is an argument, and a step writes the new rows into it.

    python examples/aliased_io_user_inputs.py
    python examples/aliased_io_user_inputs.py --engine aot

First a model that writes to its argument, which is recognised. Then one that returns a new state instead: with
`alias={"new_state": "state"}` the caller declares that it is to live where the old one is. A declaration that cannot be
kept is refused.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from showing import PAGE, check, eligible, engine, measure, show
from torch import Tensor, nn

from inlay import Example
from inlay.capture import capture
from inlay.compile.program import compile_program
from inlay.errors import UsageError
from inlay.testing.watch import paged

if TYPE_CHECKING:
    from inlay import Program

SHAPE = (1, 4, 1024, 64)
"""[batch, kv_heads, max_len, head_dim]"""


class Append(nn.Module):
    """Writes a row of keys at a position, and looks at all of them."""

    def forward(self, cache: Tensor, row: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(2, at, row)
        return cache.mean(2)


class Decay(nn.Module):
    """A state that is computed anew at every step, from itself."""

    def forward(self, state: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"new_state": 0.5 * state + x, "largest": x.max()}


def given_and_written(name: str) -> bool:
    print("# The model writes to a cache that it is given\n")
    model, row = Append(), torch.randn(1, 4, 1, 64)
    program = capture(Example(model, (torch.zeros(SHAPE), row, torch.tensor([0]))))
    step = compile_program(program, name)
    show(step)

    cache, expected = paged(SHAPE), torch.zeros(SHAPE)
    address, same = cache.data_ptr(), True
    for position in range(8):
        row, at = torch.randn(1, 4, 1, 64), torch.tensor([position])
        wanted = model(expected, row, at)
        same &= torch.allclose(step(cache, row, at), wanted, atol=1e-6)
    same &= torch.equal(cache, expected)
    moved = measure("cache", lambda: step(cache, row, at), cache)
    return all(
        [
            eligible(step),
            check("only the pages of the new row are written", 0 < moved.written <= 4 * PAGE),
            check("nothing as large as the cache is copied", moved.copies(cache.nbytes) == 0),
            check("the cache is where it was", cache.data_ptr() == address),
            check("8 steps equal eager PyTorch, cache included", same),
        ]
    )


def declared(name: str) -> bool:
    print("\n# The model returns a new state; the caller declares where it lives\n")
    model = Decay()
    program = capture(Example(model, (torch.zeros(SHAPE), torch.ones(SHAPE))))
    step = compile_program(program, name, alias={"new_state": "state"})
    show(step)

    state, x, expected = paged(SHAPE), torch.randn(SHAPE), torch.zeros(SHAPE)
    for _ in range(8):
        returned = step(state, x)["new_state"]
        expected = model(expected, x)["new_state"]
    same = torch.allclose(state, expected)
    moved = measure("state", lambda: step(state, x), state)
    return all(
        [
            eligible(step),
            check("all of it is new at every step, and no second one is made", moved.copies(state.nbytes) == 0),
            check("what is returned is the state itself", returned is state),
            check("8 steps equal eager PyTorch", same),
            refused(program, name),
        ]
    )


def refused(program: Program, name: str) -> bool:
    print("\n# A declaration that cannot be kept\n")
    try:
        compile_program(program, name, alias={"largest": "state"})
    except UsageError as error:
        print(error)
        return check("it is refused", True)
    return check("it is refused", False)


def main(arguments: list[str] | None = None) -> int:
    name = engine(__doc__, arguments)
    torch.manual_seed(0)
    with torch.no_grad():
        return 0 if given_and_written(name) & declared(name) else 1


if __name__ == "__main__":
    sys.exit(main())
