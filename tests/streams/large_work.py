"""Work as large as a test needs, with times at random: a decoder with a cache, and something without any order."""

from __future__ import annotations

import random

from inlay.streams import Lifetime, Storage, Task, WorkGraph

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


def decoder(tasks: int, seed: int = 0) -> WorkGraph:
    """At least so many tasks, in whole layers; the residual is one storage that every layer adds to."""
    rng = random.Random(seed)
    made = [Task("embed", (), ("hidden",), 1e-4)]
    storages = {"hidden": Storage("hidden", Lifetime.RESULT)}
    layer = 0
    while len(made) < tasks:
        for name, reads, writes in LAYER:
            own = {each: each if each == "hidden" else f"{layer}.{each}" for each in (*reads, *writes)}
            for short, each in own.items():
                life = Lifetime.STATE if short in ("key", "value") else Lifetime.INTERMEDIATE
                storages.setdefault(each, Storage(each, life))
            taken, written = tuple(own[each] for each in reads), tuple(own[each] for each in writes)
            made.append(Task(f"{layer}.{name}", taken, written, rng.uniform(1e-5, 1e-3)))
        layer += 1
    return WorkGraph(tuple(made), tuple(storages.values()))


def tangled(tasks: int, seed: int = 0) -> WorkGraph:
    """Each task reads one or two values made not long before; each value is read. Some write to a state in place."""
    rng = random.Random(seed)
    made, storages = list[Task](), [Storage(f"state{place}", Lifetime.STATE) for place in range(64)]
    unread, recent = list[str](), ["state0"]
    for place in range(tasks):
        reads = {rng.choice(recent)}
        if len(unread) > 20 or (rng.random() < 0.3 and unread):
            reads.add(unread.pop(0))
        unread = [each for each in unread if each not in reads]
        storages.append(Storage(f"value{place}"))
        state = (f"state{rng.randrange(64)}",) if rng.random() < 0.1 else ()
        writes = (f"value{place}", *state)
        made.append(Task(f"task{place}", (*sorted(reads), *state), writes, rng.uniform(1e-5, 1e-3)))
        unread.append(f"value{place}")
        recent = [*recent[-39:], f"value{place}"]
    return WorkGraph(tuple(made), tuple(storages))
