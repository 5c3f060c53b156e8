"""Stock decoders in lanes: a Llama, experts with a shared one beside them, attention and MLP in parallel."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from inlay.frontend import capture, with_static_cache
from inlay.program import Program, Role
from inlay.streams import (
    Lifetime,
    build_work,
    check_schedule,
    cross_lane_edges,
    group_tasks,
    measure_calls,
    plan_schedule,
    predict_times,
    serial_schedule,
)
from tests.architectures import config_of
from tests.models import random_model
from tests.streams.interleavings import any_order, calls_of, run_calls

MODELS = {"llama": 2, "deepseek_v3": 3, "gpt_neox": 2}
"""Model type → layers; the third of them is the first with experts."""


@cache
def _decoding(model_type: str) -> Program:
    model = random_model(config_of(model_type, num_hidden_layers=MODELS[model_type]))
    return capture(with_static_cache(model, max_length=32, length=None))


def _given(program: Program, length: int = 8) -> dict[str, Any]:
    torch.manual_seed(0)
    values: dict[str, Any] = {name: ref.read() for name, ref in program.tensors.items()}
    for row in program.bindings.with_role(Role.INPUT):
        shape = [size if isinstance(size, int) else length for size in row.shape]
        tokens = row.name == "input_ids"
        values[row.name] = torch.randint(250, shape) if tokens else torch.zeros(shape, dtype=getattr(torch, row.dtype))
    return values


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_in_lanes(model_type: str) -> None:
    program = _decoding(model_type)
    given = _given(program)
    inputs = {row.name: given[row.name] for row in program.bindings.with_role(Role.INPUT)}
    measured = measure_calls(program, inputs, rounds=1)
    assert all(seconds > 0 for seconds in measured.values())
    rng = random.Random(0)  # the schedule must not depend on how fast this machine is just now
    work = build_work(program, {name: rng.uniform(1e-6, 1e-4) for name in measured})
    assert check_schedule(work, serial_schedule(work)).ok
    states = {each.name for each in work.storages if each.lifetime is Lifetime.STATE}
    assert states == {row.name for row in program.bindings.state}
    expected = run_calls(program, given, calls_of(work, [task.name for task in work.tasks]))
    for pieces, lanes in ((work, 2), (work, 4), (group_tasks(work, 2e-5), 3)):
        made = plan_schedule(pieces, lanes=lanes, event_seconds=0.0)
        assert check_schedule(pieces, made).ok
        assert len(made.lanes) > 1
        assert max(end for _, end in predict_times(pieces, made, 0.0).values()) < pieces.seconds
        assert 0 < len(made.events) < len(cross_lane_edges(pieces, made))
        for seed in range(3):
            order = any_order(random.Random(seed), made)
            found = run_calls(program, given, calls_of(pieces, order))
            assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_state_is_written_after_it_is_read() -> None:
    """The count of a cache is read by many and then written: without the event of that order there is a race."""
    program = _decoding("gpt_neox")
    names = [task.name for task in build_work(program).tasks]
    work = build_work(program, dict.fromkeys(names, 1e-5))
    (writer,) = [task.name for task in work.tasks if "count_0" in task.writes]
    readers = [task.name for task in work.tasks if "count_0" in task.reads and task.name != writer]
    assert readers
    made = serial_schedule(work)
    alone = type(made)((tuple(name for name in made.lanes[0] if name != writer), (writer,)))
    found = {
        (race.kind.name, race.first, race.second)
        for race in check_schedule(work, alone).races
        if race.storage == "count_0"
    }
    assert found == {("WAR", reader, writer) for reader in readers}
