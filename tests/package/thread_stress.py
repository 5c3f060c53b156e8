"""Many threads on packages: `python thread_stress.py THREADS GENERATIONS SEED PACKAGE...` prints what they found.

Every text must be the one that the package gives to one thread. Requests have prompts and answers of mixed lengths, and
half of them draw; each comes several times, on whichever thread is free.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import inlay
from inlay.runtime.sampling import Sampling

if TYPE_CHECKING:
    from inlay.runtime.language_model import LanguageModel

DISTINCT = 60
"""Requests that differ."""
SENTENCE = "the quick brown fox jumps over a lazy dog while Über Fuß 你好 naïve café 🦊 1234"
WORDS = SENTENCE.split()


@dataclass(frozen=True)
class Asked:
    """What a package is asked for."""

    package: int
    prompt: str
    max_tokens: int
    sampling: Sampling
    stream: bool

    def answer(self, models: list[LanguageModel]) -> tuple[int, ...]:
        model = models[self.package]
        if self.stream:
            pieces = model.generate(self.prompt, max_tokens=self.max_tokens, sampling=self.sampling, stream=True)
            return tuple(piece.token for piece in pieces)
        return model.generate(self.prompt, max_tokens=self.max_tokens, sampling=self.sampling).tokens


def requests(seed: int, packages: int) -> list[Asked]:
    rng = random.Random(seed)
    return [
        Asked(
            number % packages,
            " ".join(rng.choices(WORDS, k=rng.choice((1, 2, 5, 12)))),
            rng.choice((1, 3, 8, 20)),
            Sampling(temperature=1.0, seed=number) if number % 2 else Sampling(),
            rng.random() < 0.2,
        )
        for number in range(DISTINCT)
    ]


def main(threads: int, generations: int, seed: int, paths: list[Path]) -> None:
    torch.set_num_threads(1)
    asked = requests(seed, len(paths))
    one = [inlay.load(path) for path in paths]
    alone = [request.answer(one) for request in asked]
    # All of them load the packages at the same time, and work on those of one of them.
    models: list[list[LanguageModel]] = []
    together = threading.Barrier(threads)

    def load() -> None:
        together.wait()
        models.append([inlay.load(path) for path in paths])

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(load) for _ in range(threads)]:
            done.result()
        order = [number % DISTINCT for number in range(generations)]
        random.Random(seed).shuffle(order)
        started = time.perf_counter()
        found = list(pool.map(lambda number: asked[number].answer(models[0]), order))
        seconds = time.perf_counter() - started
    wrong = [number for number, tokens in zip(order, found, strict=True) if tokens != alone[number]]
    tokens = sum(map(len, found))
    print(json.dumps({"generations": len(found), "wrong": len(wrong), "tokens": tokens, "seconds": round(seconds, 1)}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [Path(path) for path in sys.argv[4:]])
