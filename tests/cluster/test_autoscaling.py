"""The number of replicas: enough for the tokens that wait, and no change that the next moment reverses."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from inlay.cluster.autoscaling import BUSY, queued_tokens_policy, wanted_replicas

pytestmark = pytest.mark.fast


def context(now: int, loads: list[tuple[float, float]], in_ingress: float = 0.0, target: int | None = None) -> Any:
    """Return what Serve gives a policy: for each replica its waiting requests, of 100 tokens each, and sequences."""
    names = ("queued_tokens", "queued", "running", "slots")
    series = [
        {number: [SimpleNamespace(value=0.0), SimpleNamespace(value=value)] for number, value in enumerate(values)}
        for values in (
            [100 * waiting for waiting, _ in loads],
            [waiting for waiting, _ in loads],
            [running for _, running in loads],
            [4.0 for _ in loads],
        )
    ]
    return SimpleNamespace(
        current_num_replicas=now,
        target_num_replicas=now if target is None else target,
        total_queued_requests=in_ingress,
        raw_metrics=dict(zip(names, series, strict=True)),
    )


def test_tokens_that_wait_anywhere_add_replicas() -> None:
    assert queued_tokens_policy(context(1, [(50, 4)]), queued_tokens=1_000)[0] == 7, "as many as the sequences need"
    assert queued_tokens_policy(context(1, [(10, 4)]), queued_tokens=200)[0] == 5
    assert queued_tokens_policy(context(1, [(0, 4)], in_ingress=40), queued_tokens=8_000)[0] == 6
    assert queued_tokens_policy(context(1, [(10, 4)], in_ingress=10), queued_tokens=200)[0] == 10
    assert queued_tokens_policy(context(2, [(1, 4), (0, 4)]), queued_tokens=1_000)[0] == 2


def test_short_prompts_with_long_answers_add_replicas() -> None:
    """They fill the slots, however few tokens wait."""
    assert queued_tokens_policy(context(1, [(16, 4)]), queued_tokens=100_000)[0] == 3


def test_replicas_that_start_are_not_given_up() -> None:
    assert queued_tokens_policy(context(4, [(1, 4)] * 4, target=8), queued_tokens=1_000)[0] == 8


def test_without_all_measurements_nothing_changes() -> None:
    empty = SimpleNamespace(current_num_replicas=3, target_num_replicas=3, total_queued_requests=None, raw_metrics=None)
    assert queued_tokens_policy(empty)[0] == 3
    assert queued_tokens_policy(context(3, [(0, 0), (0, 0)]))[0] == 3
    assert queued_tokens_policy(context(3, [(0, 0)] * 3))[0] == 1


@pytest.mark.parametrize("seed", range(20))
def test_what_runs_fits_into_what_stays(seed: int) -> None:
    """Removing replicas leaves room for every sequence; more load never asks for fewer replicas."""
    rng = random.Random(seed)
    now, slots = rng.randrange(1, 50), rng.randrange(1, 32)
    running = rng.randrange(0, now * slots + 1)
    calm = wanted_replicas(now, 0, 2_048, running, slots)
    assert 1 <= calm <= now
    assert calm == now or calm * slots * BUSY >= running
    asked = [wanted_replicas(now, waiting, 2_048, running, slots) for waiting in range(0, 200_000, 997)]
    assert asked == sorted(asked)
    assert asked[1] >= now, "none is removed while anything waits"
