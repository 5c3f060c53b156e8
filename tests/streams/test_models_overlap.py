"""Stock decoders in lanes: a Llama, experts with a shared one beside them, attention and MLP in parallel."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from running import any_order, calls_of, run_calls

from architectures import config_of
from inlay.capture import capture, with_static_cache
from inlay.program import Program, Role
from inlay.streams import (
    Life,
    check,
    edges_across,
    grouped,
    in_order,
    measured_calls,
    predicted,
    schedule,
    work_of_program,
)
from models import random_model

MODELS = {"llama": 2, "deepseek_v3": 3, "gpt_neox": 2}
"""Model type → layers; the third of them is the first with experts."""


@cache
def _decoding(model_type: str) -> Program:
    model = random_model(config_of(model_type, num_hidden_layers=MODELS[model_type]))
    return capture(with_static_cache(model, max_length=32, length=None))


def _given(program: Program, length: int = 8) -> dict[str, Any]:
    torch.manual_seed(0)
    values: dict[str, Any] = {name: ref.read() for name, ref in program.tensors.items()}
    for row in program.bindings.of(Role.INPUT):
        shape = [size if isinstance(size, int) else length for size in row.shape]
        tokens = row.name == "input_ids"
        values[row.name] = torch.randint(250, shape) if tokens else torch.zeros(shape, dtype=getattr(torch, row.dtype))
    return values


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_in_lanes(model_type: str) -> None:
    program = _decoding(model_type)
    given = _given(program)
    inputs = {row.name: given[row.name] for row in program.bindings.of(Role.INPUT)}
    measured = measured_calls(program, inputs, rounds=1)
    assert all(seconds > 0 for seconds in measured.values())
    rng = random.Random(0)  # the schedule must not depend on how fast this machine is just now
    work = work_of_program(program, {name: rng.uniform(1e-6, 1e-4) for name in measured})
    assert check(work, in_order(work)).ok
    states = {each.name for each in work.storages if each.life is Life.STATE}
    assert states == {row.name for row in program.bindings.state}
    expected = run_calls(program, given, calls_of(work, [task.name for task in work.tasks]))
    for pieces, lanes in ((work, 2), (work, 4), (grouped(work, 2e-5), 3)):
        made = schedule(pieces, lanes=lanes, event_seconds=0.0)
        assert check(pieces, made).ok
        assert len(made.lanes) > 1
        assert max(end for _, end in predicted(pieces, made, 0.0).values()) < pieces.seconds
        assert 0 < len(made.events) < len(edges_across(pieces, made))
        for seed in range(3):
            order = any_order(random.Random(seed), made)
            found = run_calls(program, given, calls_of(pieces, order))
            assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_state_is_written_after_it_is_read() -> None:
    """The count of a cache is read by many and then written: without the event of that order there is a race."""
    program = _decoding("gpt_neox")
    names = [task.name for task in work_of_program(program).tasks]
    work = work_of_program(program, dict.fromkeys(names, 1e-5))
    (writer,) = [task.name for task in work.tasks if "count_0" in task.writes]
    readers = [task.name for task in work.tasks if "count_0" in task.reads and task.name != writer]
    assert readers
    made = in_order(work)
    alone = type(made)((tuple(name for name in made.lanes[0] if name != writer), (writer,)))
    found = {
        (race.kind.name, race.first, race.second) for race in check(work, alone).races if race.storage == "count_0"
    }
    assert found == {("WAR", reader, writer) for reader in readers}
