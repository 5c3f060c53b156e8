"""The scheduler, simulated with thousands of requests and no model."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from inlay.runtime.scheduler import Limits, RunningSequence, WaitingRequest, schedule

pytestmark = pytest.mark.fast


@dataclass
class Told:
    """What became of one request."""

    prompt: int
    answer: int
    priority: int
    came: int
    joined: int = -1
    tokens: tuple[int, ...] = ()
    gone: int = -1


def _simulate(seed: int, requests: int, limits: Limits, rate: float, cancel: float = 0.0) -> dict[int, Told]:
    rng = random.Random(seed)
    told: dict[int, Told] = {}
    waiting: list[WaitingRequest] = []
    running: dict[int, RunningSequence] = {}
    step = 0
    while len(told) < requests or waiting or running:
        while len(told) < requests and rng.random() < rate:
            number = len(told)
            told[number] = Told(rng.randrange(1, 900), rng.randrange(1, 60), rng.choice([0, 0, 0, 1]), step)
            waiting.append(WaitingRequest(number, number, told[number].priority))
        for number in [each for each in running if rng.random() < cancel]:
            told[number].gone = step
            del running[number]
        plan = schedule(waiting, list(running.values()), limits)
        assert plan == schedule(waiting[::-1], list(running.values())[::-1], limits), "order of giving does not matter"
        slots = {each.slot for each in running.values()}
        for number, slot in plan.admit:
            assert slot not in slots
            assert 0 <= slot < limits.slots
            slots.add(slot)
            ask = next(each for each in waiting if each.id == number)
            waiting.remove(ask)
            told[number].joined = step
            running[number] = RunningSequence(number, number, slot, told[number].prompt, ask.priority)
        assert len(running) <= limits.slots
        assert not slots & set(plan.padding), "only free slots fill up a batch"
        padded = len(plan.decode) + len(plan.padding)
        assert not plan.padding or padded in limits.batches
        for number in plan.decode:
            told[number].tokens += (step,)
            if len(told[number].tokens) == told[number].answer:
                told[number].gone = step
                del running[number]
        assert sum(count for _, count in plan.prefill) <= (
            limits.max_prefill_tokens if plan.decode else limits.max_prefill_only_tokens
        )
        for number, count in plan.prefill:
            assert 0 < count <= running[number].prefill_tokens_left
            running[number] = running[number]._replace(prefill_tokens_left=running[number].prefill_tokens_left - count)
        step += 1
        assert step < requests * 1_000, "it does not end"
    return told


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_everybody_is_answered(seed: int) -> None:
    told = _simulate(seed, 2_000, Limits(16, 64, 512), rate=0.2)
    assert all(len(each.tokens) == each.answer for each in told.values())


def test_who_answers_is_never_stalled() -> None:
    told = _simulate(3, 1_000, Limits(8, 64, 64), rate=0.5)
    for each in told.values():
        assert list(each.tokens) == list(range(each.tokens[0], each.tokens[0] + each.answer)), "a token in every step"


def test_first_come_first_served_within_a_priority() -> None:
    told = _simulate(4, 1_000, Limits(4, 64, 128), rate=0.9)
    for priority in (0, 1):
        joined = [each.joined for _, each in sorted(told.items()) if each.priority == priority]
        assert joined == sorted(joined)
    waits = {
        priority: [each.joined - each.came for each in told.values() if each.priority == priority]
        for priority in (0, 1)
    }
    assert sum(waits[1]) / len(waits[1]) < sum(waits[0]) / len(waits[0]) / 4


def test_slots_of_those_who_left_are_used_again() -> None:
    told = _simulate(5, 2_000, Limits(4, 32, 64, batches=(1, 2, 4)), rate=0.3, cancel=0.01)
    assert all(each.gone >= 0 for each in told.values())
    assert sum(len(each.tokens) < each.answer for each in told.values()) > 50, "some were cancelled"


def test_a_batch_is_filled_up_to_a_size_that_there_is_code_for() -> None:
    limits = Limits(8, 64, 64, batches=(4, 8))
    running = [RunningSequence(number, number, slot, 0) for number, slot in enumerate((0, 2, 5))]
    assert schedule([], running, limits).padding == (1,)
    assert schedule([WaitingRequest(9, 9)], running, limits).padding == (3,), "slot 1 goes to who joins"
    assert schedule([], [running[0]._replace(drafted_tokens=1), *running[1:]], limits).padding == (), "a row each"
    assert schedule([], running[:0], limits).padding == ()
    assert schedule([], running, replace(limits, batches=(2,))).padding == (), "there is no larger one"
    full = [RunningSequence(number, number, number, 5 if number > 4 else 0) for number in range(8)]
    assert schedule([], full, limits).padding == (), "no slot is free"


def test_short_prompts_are_read_together_and_in_order() -> None:
    running = [
        RunningSequence(1, 1, 0, 30),
        RunningSequence(2, 2, 1, 30),
        RunningSequence(3, 3, 2, 30, priority=1),
        RunningSequence(4, 4, 3, 0),
    ]
    assert schedule([], running, Limits(4, 64, 512)).prefill == ((3, 30), (1, 30), (2, 4))
