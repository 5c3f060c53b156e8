"""Decoders whose steps do more than they should, planted and drawn at random, and whether measuring them tells.

    python tests/package/traffic_faults.py --seed 1 --count 200

Steps are Python here, so that a fault needs no compiler: attention is a sum over filled rows, into given memory.
A fault is an operation, on part of the cache or as large as part of it, in one bucket, at some fills. What measuring
cannot tell is not drawn: who reads a filled row, if nothing is allocated for it. That is left to the static half.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from inlay.lowering.buckets import Bucket
from inlay.lowering.executable import Executable
from inlay.package.memory_traffic import Traffic, measure
from inlay.program.bindings import Alias, Binding, Bindings, Role

SLOTS, HEADS, WIDTH = 4, 2, 64
ROOMS = (512, 768)
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.malloc.argtypes = [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]
Work = Callable[[dict[str, Any]], None]


def decoder(room: int, fault: Work = lambda given: None) -> Executable:
    """Two caches in one layer; `fault` is called in every step, before what the step is for."""
    sizes: tuple[int | str, ...] = (SLOTS, HEADS, room, WIDTH)
    ins = [
        Binding("input_ids", Role.INPUT, "input_ids", "int64", ("batch", "length")),
        *(Binding(name, Role.INPUT, name, "int64", ("batch",)) for name in ("slots", "lengths")),
        *(Binding(name, Role.INPUT, name, "float32", sizes) for name in ("keys", "values")),
    ]
    outs = [
        Binding("logits", Role.OUTPUT, "logits", "float32", ("batch", 1, WIDTH)),
        *(
            Binding(f"new_{name}", Role.OUTPUT, name, "float32", sizes, Alias(name, "kv_cache_update"))
            for name in ("keys", "values")
        ),
    ]
    sums = torch.empty(HEADS, WIDTH)

    def step(given: Any) -> list[Any]:
        fault(given)
        logits = torch.zeros(len(given["slots"]), 1, WIDTH)
        length = given["input_ids"].shape[1]
        for index, (slot, before) in enumerate(zip(given["slots"].tolist(), given["lengths"].tolist(), strict=True)):
            for name in ("keys", "values"):
                given[name][slot, :, before : before + length] = given["input_ids"][index][None, :, None].float()
                torch.sum(given[name][slot, :, : before + length], 1, out=sums)
                logits[index, 0] += sums.sum(0)
        return [logits]

    one = Bucket("length=1", {"batch": (1, SLOTS), "length": (1, 1)}, (), (), ())
    more = Bucket("length=2..", {"batch": (1, SLOTS), "length": (2, room)}, (), (), ())
    return Executable(Bindings((*ins, *outs)), [(one, step), (more, step)], {})


@dataclass
class Fault:
    """What is done, to which rows, how much of them, in which bucket, and when."""

    operation: str
    rows: str
    fraction: float
    bucket: str
    when: str
    kept: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def __call__(self, given: dict[str, Any]) -> None:
        cache, length, before = given["values"], given["input_ids"].shape[1], int(given["lengths"][0])
        room = cache.shape[2]
        full = before == room - length
        if (length == 1) != (self.bucket == "one"):
            return
        if not {"always": True, "empty": before == 0, "filled": before > 0, "full": full}[self.when]:
            return
        slot = int(given["slots"][0]) if self.rows != "other" else 0
        count = int(self.fraction * (before if self.rows == "filled" else room))
        if count:
            OPERATIONS[self.operation](cache[slot, :, :count], self.kept)

    @property
    def is_seen(self) -> bool:
        """Whether it does something that grows, is not only a read of filled rows, and not done once and for all."""
        least = {"full": 1, "filled": 0.5}.get(self.when, 0)  # the part of the room that is filled whenever it is done
        quiet = self.operation in ("shadow", "read") and (
            self.rows == "filled" or (self.rows == "room" and self.fraction <= least)
        )
        nothing = self.rows == "filled" and self.when == "empty"
        once = self.operation == "scratch" and self.rows != "filled" and self.when in ("always", "empty")
        return not quiet and not nothing and not once


def _shadow(part: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
    kept.setdefault("shadow", torch.empty(HEADS, max(ROOMS), WIDTH))[:, : part.shape[1]].copy_(part)


def _scratch(part: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
    if "scratch" not in kept or kept["scratch"].numel() < part.numel():
        kept["scratch"] = torch.empty(part.numel())


def _malloc(part: torch.Tensor, kept: dict[str, torch.Tensor]) -> None:
    LIBC.free(LIBC.malloc(part.nbytes))


OPERATIONS: dict[str, Callable[[torch.Tensor, dict[str, torch.Tensor]], Any]] = {
    "clone": lambda part, kept: part.clone(),
    "cast": lambda part, kept: part.bfloat16(),
    "gather": lambda part, kept: part.index_select(1, torch.arange(part.shape[1])),
    "transpose": lambda part, kept: part.transpose(1, 2).contiguous(),
    "softmax": lambda part, kept: part.softmax(-1),
    "read": lambda part, kept: part.sum(),
    "shadow": _shadow,
    "rewrite": lambda part, kept: part.mul_(1),
    "scratch": _scratch,
    "malloc": _malloc,
    "mmap": lambda part, kept: mmap.mmap(-1, part.nbytes).close(),
}


def padded_to_the_longest(given: dict[str, Any]) -> None:
    """As many rows of every sequence as the longest of them has."""
    longest = int(given["lengths"].max()) + given["input_ids"].shape[1]
    given["values"][given["slots"][-1], :, :longest].sum()


PLANTED: dict[str, Work] = {
    "rows of the longest sequence read of all": padded_to_the_longest,
    "a cast of half the size": Fault("cast", "room", 1, "one", "always"),
    "one slot gathered": Fault("gather", "other", 1, "one", "always"),
    "a shadow copy": Fault("shadow", "room", 1, "one", "always"),
    "malloc inside a kernel": Fault("malloc", "room", 0.25, "one", "always"),
    "memory mapped inside a kernel": Fault("mmap", "filled", 0.5, "one", "always"),
    "a copy in the second bucket only": Fault("clone", "filled", 0.5, "more", "always"),
    "a copy when full only": Fault("clone", "room", 0.25, "one", "full"),
    "an eighth of the filled rows, laid out anew": Fault("transpose", "filled", 0.125, "one", "filled"),
    "filled rows written again": Fault("rewrite", "filled", 0.5, "more", "full"),
    "memory that is kept and grows": Fault("scratch", "filled", 0.25, "one", "always"),
    "rows read that hold nothing": Fault("read", "room", 0.5, "one", "empty"),
    "a copy when empty only": Fault("clone", "room", 0.125, "more", "empty"),
}


@cache
def _sound(room: int) -> Traffic:
    return measure(decoder(room))


def problems(fault: Work) -> list[str]:
    """What measuring two lengths of caches says."""
    short, long = (measure(decoder(room, fault)) for room in ROOMS)
    return [*short.problems(), *long.problems(), *short.find_growth(long)]


def drawn(seed: int, count: int) -> list[Fault]:
    """Faults at random, each of a kind that can be seen."""
    rng, made = random.Random(seed), list[Fault]()
    while len(made) < count:
        fault = Fault(
            rng.choice(list(OPERATIONS)),
            rng.choice(["room", "filled", "other"]),
            rng.choice([1, 0.5, 0.25, 0.125, 0.0625]),
            rng.choice(["one", "more"]),
            rng.choice(["always", "empty", "filled", "full"]),
        )
        if fault.is_seen:
            made.append(fault)
    return made


def seed_of_commit() -> int:
    """Other faults for every commit."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(run.stdout[:8] or "0", 16) if run.returncode == 0 else 0


def main() -> None:
    """Print as JSON what the sound decoder is said to do wrong, and which faults are not noticed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=seed_of_commit())
    parser.add_argument("--count", type=int, default=200)
    asked = parser.parse_args()
    faults = PLANTED | {str(fault): fault for fault in drawn(asked.seed, asked.count)}
    short, long = map(_sound, ROOMS)
    huge = _sound(16 * ROOMS[0])
    told = [*short.problems(), *long.problems(), *short.find_growth(long), *short.find_growth(huge)]
    missed = [name for name, fault in faults.items() if not problems(fault)]
    report = {"seed": asked.seed, "faults": len(faults), "counts": short.counts_allocations, "sound": told}
    json.dump(report | {"missed": missed}, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
