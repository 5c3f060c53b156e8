"""The scheduler, simulated with thousands of requests and no model."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from inlay.runtime.schedule import Ask, Limits, Sequence_, schedule

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
    waiting: list[Ask] = []
    running: dict[int, Sequence_] = {}
    step = 0
    while len(told) < requests or waiting or running:
        while len(told) < requests and rng.random() < rate:
            number = len(told)
            told[number] = Told(rng.randrange(1, 900), rng.randrange(1, 60), rng.choice([0, 0, 0, 1]), step)
            waiting.append(Ask(number, number, told[number].priority))
        for number in [each for each in running if rng.random() < cancel]:
            told[number].gone = step
            del running[number]
        plan = schedule(waiting, list(running.values()), limits)
        assert plan == schedule(waiting[::-1], list(running.values())[::-1], limits), "order of giving does not matter"
        slots = {each.slot for each in running.values()}
        for number, slot in plan.join:
            assert slot not in slots
            assert 0 <= slot < limits.slots
            slots.add(slot)
            ask = next(each for each in waiting if each.id == number)
            waiting.remove(ask)
            told[number].joined = step
            running[number] = Sequence_(number, number, slot, told[number].prompt, ask.priority)
        assert len(running) <= limits.slots
        for number in plan.answer:
            told[number].tokens += (step,)
            if len(told[number].tokens) == told[number].answer:
                told[number].gone = step
                del running[number]
        if plan.read:
            number, count = plan.read
            assert 0 < count <= min(limits.chunk, running[number].left)
            running[number] = replace(running[number], left=running[number].left - count)
        step += 1
        assert step < requests * 1_000, "it does not end"
    return told


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_everybody_is_answered(seed: int) -> None:
    told = _simulate(seed, 2_000, Limits(16, 64), rate=0.2)
    assert all(len(each.tokens) == each.answer for each in told.values())


def test_who_answers_is_never_stalled() -> None:
    told = _simulate(3, 1_000, Limits(8, 64), rate=0.5)
    for each in told.values():
        assert list(each.tokens) == list(range(each.tokens[0], each.tokens[0] + each.answer)), "a token in every step"


def test_first_come_first_served_within_a_priority() -> None:
    told = _simulate(4, 1_000, Limits(4, 64), rate=0.9)
    for priority in (0, 1):
        joined = [each.joined for _, each in sorted(told.items()) if each.priority == priority]
        assert joined == sorted(joined)
    waits = {
        priority: [each.joined - each.came for each in told.values() if each.priority == priority] for priority in (0, 1)
    }
    assert sum(waits[1]) / len(waits[1]) < sum(waits[0]) / len(waits[0]) / 4


def test_slots_of_those_who_left_are_used_again() -> None:
    told = _simulate(5, 2_000, Limits(4, 32), rate=0.3, cancel=0.01)
    assert all(each.gone >= 0 for each in told.values())
    assert sum(len(each.tokens) < each.answer for each in told.values()) > 50, "some were cancelled"
