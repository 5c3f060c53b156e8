"""Builds of a tiny module: `python tiny_builds.py FOLDER COUNT SEED` builds it over and over and prints what happened.

Several such processes share one cache. In between, the cache is cleared, made too small for all entries, and builds are
killed. Each package that was built is verified, loaded and run. A library is compiled once a process and variant:
compiling touches nothing of the cache.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from inlay import Example
from inlay.build_cache.store import LIMIT, BuildCache
from inlay.flow import BuildOptions, BuildResult, build
from inlay.package import writer
from inlay.package.loader import load_package
from inlay.program.text.printer import dump

VARIANTS = 4


class Tiny(torch.nn.Module):
    """One linear layer, and a state that it writes to."""

    seen: torch.Tensor

    def __init__(self, variant: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(16.0).reshape(4, 4) / 16 + seed)
            self.linear.bias.zero_()
        self.register_buffer("seen", torch.full((16, 4), 2.0))
        self.variant = variant

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.seen.index_copy_(0, at, self.linear(x).relu() + self.variant)
        return self.seen.sum(0)


def example(variant: int = 0, seed: int = 0) -> Example:
    return Example(Tiny(variant, seed), (torch.ones(2, 4), torch.tensor([1, 2])))


def is_right(path: Path, variant: int = 0, seed: int = 0) -> bool:
    """Whether a package is whole and gives the numbers of the module."""
    loaded = load_package(path, verify=True)
    state, module = loaded.new_state(), Tiny(variant, seed)
    for step in range(3):
        given = {"x": torch.full((2, 4), step / 4), "at": torch.tensor([step, step + 5])}
        with torch.no_grad():
            expected = module(given["x"], given["at"])
        if not torch.allclose(next(iter(loaded({**state, **given}).values())), expected):
            return False
    return True


def compile_once() -> None:
    """Every distinct piece is compiled once in this process."""
    patched: Any = writer
    real, made = patched.build_library, dict[Any, Any]()

    def known(program: Any, states: Any = (), level: str = "native") -> Any:
        key = dump(program), tuple(states), level
        if key not in made:
            made[key] = real(program, states, level)
        return made[key]

    patched.build_library = known


def killed(variant: int, path: Path, seconds: float) -> None:
    """A build that is killed after a while, if it is not faster."""
    process = os.fork()
    if process == 0:
        try:
            build(example(variant), path)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    shutil.rmtree(path, ignore_errors=True)


def disturb(rng: random.Random, cache: BuildCache, folder: Path) -> str:
    """Now and then something happens to the cache."""
    chance = rng.random()
    if chance < 0.02:
        cache.clear()
        return "cleared"
    if chance < 0.04:
        sizes = [row["size"] for row in cache.listing()]
        cache.limit = 2 * max(sizes, default=10**6) + 1
        return "limited"
    if chance < 0.06:
        cache.limit = LIMIT
        return "unlimited"
    if chance < 0.10:
        killed(rng.randrange(VARIANTS), folder / "killed", rng.uniform(0, 0.6))
        return "killed"
    return "undisturbed"


def main(folder: Path, count: int, seed: int) -> None:
    torch.set_num_threads(1)
    compile_once()
    rng, cache, seen = random.Random(seed), BuildCache(), Counter[str]()
    for number in range(count):
        seen[disturb(rng, cache, folder)] += 1
        variant, path = rng.randrange(VARIANTS), folder / f"{seed}-{number}"
        built: BuildResult = build(example(variant), path, BuildOptions())
        assert is_right(path, variant), f"build {number} of {seed} is wrong"
        seen["hit" if built.cache.hit else "miss"] += 1
        if built.cache.reason:
            seen[built.cache.reason] += 1
        shutil.rmtree(path)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
