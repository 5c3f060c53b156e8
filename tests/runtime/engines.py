"""Engines that are not started, so that a test takes their steps, and prompts for them."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from inlay.runtime.engine import Engine
from inlay.runtime.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Open = Callable[..., Engine]


@contextmanager
def opening(package: Path, **given: Any) -> Iterator[Open]:
    """A function that opens an engine with these and other settings. They are closed at the end."""
    engines: list[Engine] = []

    def open_engine(**settings: Any) -> Engine:
        engines.append(spoil(Engine.open(package, EngineSettings(**given | settings))))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def spoil(engine: Engine) -> Engine:
    """Fill the state with NaN: whoever reads what was not written shows."""
    for value in engine._memory.state.values():
        value.fill_(float("nan"))
    return engine


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens that are characters."""
    return tuple(random.Random(seed).choices(range(3, 256), k=length))
