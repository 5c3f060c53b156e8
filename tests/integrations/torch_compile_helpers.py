"""What `torch.compile(function, backend="inlay")` made of a function."""

from __future__ import annotations

from collections.abc import Iterator  # noqa: TC003
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.integrations.torch_compile import CompiledGraph, inlay

if TYPE_CHECKING:
    from collections.abc import Callable

F = torch.nn.functional


def compiled(
    function: Callable[..., Any], dynamic: bool | None = None, **options: Any
) -> tuple[Any, list[CompiledGraph]]:
    seen: list[CompiledGraph] = []
    options |= {"on_compiled": seen.append}
    return torch.compile(function, backend=inlay, dynamic=dynamic, options=options), seen


def matches(made: CompiledGraph) -> dict[str, int]:
    return {record.key: record.sites for record in made.records if record.sites}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is left of what another test compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
