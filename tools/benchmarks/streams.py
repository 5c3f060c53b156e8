"""Measure the numbers of docs/streams.md: `python tools/benchmarks/streams.py`, on an idle machine."""

from __future__ import annotations

import sys
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

sys.path += [str(Path(__file__).parents[2])]

import torch
from tests.architectures import config_of
from tests.models import random_model
from tests.streams.large_work import decoder, tangled

from inlay.frontend import capture, with_static_cache
from inlay.program import Role
from inlay.streams import (
    WorkGraph,
    build_work,
    check_schedule,
    cross_lane_edges,
    group_tasks,
    measure_calls,
    measure_event,
    plan_schedule,
    predict_times,
)

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = 128
WIDER: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LATENT = {"num_key_value_heads": 8, "moe_intermediate_size": 704, "q_lora_rank": 128, "kv_lora_rank": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "deepseek_v3": {"num_hidden_layers": 3, **LATENT},
    "gpt_neox": {"num_hidden_layers": 2},
}


def models() -> None:
    """Print events and edges between lanes, and the planned time."""
    event = measure_event()
    print(f"an event between threads: {event * 1e6:.1f} µs\n")
    print("| model | operators | pieces | lanes | edges | events | events ÷ edges | recorded | planned ÷ in order |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model_type, changes in MODELS.items():
        model = random_model(config_of(model_type, **(WIDER | changes)))
        program = capture(with_static_cache(model, max_length=2 * LENGTH, length=None))
        given = {}
        for row in program.bindings.with_role(Role.INPUT):
            shape = [size if isinstance(size, int) else LENGTH for size in row.shape]
            given[row.name] = torch.ones(shape, dtype=torch.int64) if row.name == "input_ids" else torch.zeros(shape)
            given[row.name] = given[row.name].to(getattr(torch, row.dtype))
        work = build_work(program, measure_calls(program, given, rounds=15))
        pieces = group_tasks(work, 2 * event)
        for lanes in (2, 4):
            made = plan_schedule(pieces, lanes=lanes, event_seconds=event)
            assert check_schedule(pieces, made).ok
            events, edges = len(made.events), len(cross_lane_edges(pieces, made))
            end = max(end for _, end in predict_times(pieces, made, event).values())
            share = f"{events / edges:.2f}" if edges else "—"
            print(
                f"| {model_type} | {len(work)} | {len(pieces)} | {lanes} | {edges} | {events} | {share} "
                f"| {len(made.recorded_storages)} | {end / pieces.seconds:.2f} |"
            )


def scale(make: Callable[[int], WorkGraph]) -> None:
    """Print the CPU time per task, the best of several rounds with interleaved sizes."""
    works = {size: make(size) for size in (1_000, 10_000, 100_000)}
    best: dict[tuple[str, int], float] = {}
    for _ in range(10):
        for size, work in works.items():
            for _ in range(max(1, 20_000 // size)):
                fresh, unseen = (WorkGraph(work.tasks, work.storages) for _ in range(2))
                times = [process_time()]
                made = plan_schedule(fresh, lanes=2, event_seconds=1e-6)
                times.append(process_time())
                found = check_schedule(unseen, made)
                times.append(process_time())
                assert found.ok
                group_tasks(fresh, 1e-4)
                times.append(process_time())
                for name, start, end in zip(("schedule", "check", "grouped"), times, times[1:], strict=False):
                    took = (end - start) / len(work) * 1e6
                    best[name, size] = min(best.get((name, size), took), took)
    print(f"\n| {make.__name__}, µs a task | 1,000 | 10,000 | 100,000 | last ÷ first |\n|---|---|---|---|---|")
    for name in ("schedule", "check", "grouped"):
        row = [best[name, size] for size in works]
        print(f"| {name} | {' | '.join(f'{each:.1f}' for each in row)} | {row[-1] / row[0]:.2f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    models()
    scale(decoder)
    scale(tangled)
