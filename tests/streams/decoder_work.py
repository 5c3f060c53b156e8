"""Work as large as a test needs: a decoder with a cache, layer after layer, with times at random."""

from __future__ import annotations

import random

from inlay.streams import Life, Storage, Task, Work

LAYER = (
    ("norm", ("hidden",), ("norm",)),
    ("q", ("norm",), ("q",)),
    ("k", ("norm",), ("k",)),
    ("v", ("norm",), ("v",)),
    ("rotate_q", ("q",), ("q",)),
    ("rotate_k", ("k",), ("rotated",)),
    ("write_k", ("rotated", "key"), ("key",)),
    ("write_v", ("v", "value"), ("value",)),
    ("attend", ("q", "key", "value"), ("attended",)),
    ("o", ("attended",), ("o",)),
    ("gate", ("norm",), ("gate",)),
    ("up", ("norm",), ("up",)),
    ("mix", ("gate", "up"), ("gate",)),
    ("down", ("gate",), ("down",)),
    ("add", ("hidden", "o", "down"), ("hidden",)),
)
"""Attention and MLP side by side, caches and some intermediates written in place."""


def decoder(tasks: int, seed: int = 0) -> Work:
    """At least so many tasks, in whole layers; the residual is one storage that every layer adds to."""
    rng = random.Random(seed)
    made = [Task("embed", (), ("hidden",), 1e-4)]
    storages = {"hidden": Storage("hidden", Life.RESULT)}
    layer = 0
    while len(made) < tasks:
        for name, reads, writes in LAYER:
            own = {each: each if each == "hidden" else f"{layer}.{each}" for each in (*reads, *writes)}
            for short, each in own.items():
                life = Life.STATE if short in ("key", "value") else Life.INTERMEDIATE
                storages.setdefault(each, Storage(each, life))
            taken, written = tuple(own[each] for each in reads), tuple(own[each] for each in writes)
            made.append(Task(f"{layer}.{name}", taken, written, rng.uniform(1e-5, 1e-3)))
        layer += 1
    return Work(tuple(made), tuple(storages.values()))
