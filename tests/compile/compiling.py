"""What `torch.compile(function, backend="inlay")` made of a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.compile import Compiled, inlay

if TYPE_CHECKING:
    from collections.abc import Callable

F = torch.nn.functional


def compiled(function: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> tuple[Any, list[Compiled]]:
    seen: list[Compiled] = []
    options |= {"on_compiled": seen.append}
    return torch.compile(function, backend=inlay, dynamic=dynamic, options=options), seen


def matches(made: Compiled) -> dict[str, int]:
    return {record.key: record.sites for record in made.records if record.sites}
