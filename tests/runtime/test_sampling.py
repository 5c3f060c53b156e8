"""Sampling does what transformers' logits processors do, in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inlay.errors import ProgramError, UsageError
from inlay.runtime.sampling import Sampling, probabilities, sample

pytestmark = pytest.mark.fast

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10_000},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 1.4, "top_k": 200, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.5},
]


def _expected(logits: torch.Tensor, history: list[int], settings: dict[str, Any]) -> torch.Tensor:
    from transformers import GenerationConfig
    from transformers.generation import logits_process

    config = GenerationConfig(do_sample=True, **settings)
    processors: list[Any] = []
    if config.repetition_penalty:
        processors.append(logits_process.RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.temperature:
        processors.append(logits_process.TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        processors.append(logits_process.TopKLogitsWarper(config.top_k))
    if config.top_p:
        processors.append(logits_process.TopPLogitsWarper(config.top_p))
    if config.min_p:
        processors.append(logits_process.MinPLogitsWarper(config.min_p))
    ids, scores = torch.tensor([history]), logits[None]
    for processor in processors:
        scores = processor(ids, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_probabilities_are_those_of_transformers(settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (0.5, 3.0, 12.0):
        logits = torch.randn(1000, generator=generator) * scale
        history = torch.randint(0, 1000, (60,), generator=generator).tolist()
        actual = probabilities(logits, history, Sampling(**{"temperature": 1.0} | settings))
        expected = _expected(logits, history, settings)
        assert torch.equal(actual > 0, expected > 0)
        assert torch.equal(actual, expected)


def test_ties_and_tokens_beyond_the_logits() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    settings = {"top_k": 2, "repetition_penalty": 1.5}
    actual = probabilities(logits, [0, 0, 4, 7, 5], Sampling(temperature=1, top_k=2, repetition_penalty=1.5))
    assert torch.equal(actual, _expected(logits, [0, 0, 4, 7, 5], settings)), "all that tie for the last place are kept"


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("size", [1, 2, 17, 5000])
def test_top_p_among_equals(top_p: float, size: int) -> None:
    """As many of each are kept; which of them, the unstable sort of transformers leaves to chance."""
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        logits = torch.randint(-6, 6, (size,), generator=generator).float() / 2
        actual = probabilities(logits, [], Sampling(temperature=1, top_p=top_p))
        expected = _expected(logits, [], {"top_p": top_p})
        assert (actual > 0).sum() == (expected > 0).sum()
        torch.testing.assert_close(actual.sort().values, expected.sort().values)


def test_greedy_counts_repetition() -> None:
    logits = torch.tensor([3.0, 2.9, -1.0])
    generator = torch.Generator()
    assert sample(logits, [], Sampling(), generator) == 0
    assert sample(logits, [0], Sampling(repetition_penalty=1.5), generator) == 1
    assert sample(logits, [0], Sampling(top_k=1, top_p=0.1), generator) == 0


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -4.0, 2.5])
    sampling = Sampling(temperature=1.2, top_k=4, seed=11)
    generator, count = sampling.generator(), 20_000
    drawn = torch.bincount(torch.tensor([sample(logits, [], sampling, generator) for _ in range(count)]), minlength=6)
    expected = probabilities(logits, [], sampling) * count
    kept = expected > 0
    assert drawn[~kept].sum() == 0
    chi_squared = ((drawn - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_squared < 16.27, "three degrees of freedom, one in a thousand; the seed is fixed"


def test_a_seed_fixes_the_draws() -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(5))

    def draws(sampling: Sampling) -> list[int]:
        generator = sampling.generator()
        return [sample(logits, [], sampling, generator) for _ in range(50)]

    assert draws(Sampling(temperature=1, seed=3)) == draws(Sampling(temperature=1, seed=3))
    assert draws(Sampling(temperature=1, seed=3)) != draws(Sampling(temperature=1, seed=4))
    assert draws(Sampling(temperature=1)) != draws(Sampling(temperature=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": 1e-9},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": float("nan")},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"{name} is .*must"):
        Sampling(**wrong)


def test_largest_seed_and_coldest_temperature_work() -> None:
    sampling = Sampling(temperature=0.01, seed=2**64 - 1)
    assert sample(torch.tensor([100.0, 90.0]), [], sampling, sampling.generator()) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(value: float) -> None:
    with pytest.raises(ProgramError, match="not finite"):
        sample(torch.tensor([0.0, value]), [], Sampling(), torch.Generator())


def test_biases_and_penalties_of_generated_tokens() -> None:
    """A bias is added; the penalties count generated tokens only, as a loop over them does."""
    rng = torch.Generator().manual_seed(1)
    for _ in range(20):
        logits, history = torch.randn(50, generator=rng), torch.randint(0, 60, (30,), generator=rng).tolist()
        given = Sampling(1.0, presence_penalty=0.7, frequency_penalty=-0.3, logit_bias=((3, 5.0), (7, -100.0)))
        wanted = logits.clone()
        wanted[3] += 5
        wanted[7] -= 100
        for token in range(50):
            count = history[12:].count(token)
            wanted[token] -= -0.3 * count + 0.7 * (count > 0)
        torch.testing.assert_close(probabilities(logits, history, given, 12), wanted.softmax(-1))
        greedy = Sampling(presence_penalty=0.7, frequency_penalty=-0.3, logit_bias=given.logit_bias)
        assert sample(logits, history, greedy, None, 12) == int(wanted.argmax())
        assert not greedy.is_plain_greedy


@pytest.mark.parametrize(
    "given",
    [{"presence_penalty": 2.1}, {"frequency_penalty": -3}, {"logit_bias": ((-1, 1.0),)}, {"logit_bias": ((1, 101.0),)}],
)
def test_biases_and_penalties_are_bounded(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Sampling(**given)


def test_a_bias_of_no_token() -> None:
    with pytest.raises(UsageError, match=r"logit_bias has the token 50\. The model has 50 tokens\."):
        sample(torch.zeros(50), [], Sampling(logit_bias=((50, 1.0),)), None)
