"""Two minutes of mixed load, with more clients than are let in: memory stays what it is. An hour:
`tools.benchmarks.soak`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tools.benchmarks.serving import serving
from tools.benchmarks.soak import soak, told

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly
SECONDS = 120.0


def test_memory_is_flat(package: Path) -> None:
    with serving(package, "--queue", "8") as (port, process, _):
        found = told(asyncio.run(soak(port, process, SECONDS, 24)), SECONDS)
    print(found)
    assert set(found["ends"]) <= {"200", "429", "400", "gone"}, "400: a prompt that is too long"
    assert found["ends"]["200"] > 100
    assert found["growth"] < 0.02
