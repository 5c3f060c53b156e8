"""One answer, however it is asked: what a token gives is the same bits in any chunk, any batch, and after a hit."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from inlay.package.loader import load_package
from inlay.runtime import Sampling
from inlay.runtime.engine import Engine
from inlay.runtime.language_model import generate
from inlay.runtime.request import Request
from inlay.runtime.session import SequenceSession, Session
from inlay.runtime.settings import EngineSettings
from tests.shared_cache import once_a_run
from tests.small_packages import ROOM

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.lowering.executable import Executable
    from inlay.runtime.request import RequestHandle

ANSWER = 12


@pytest.fixture(
    scope="module",
    params=["float32", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("int8", "bfloat16", "int4"))],
)
def executable(request: pytest.FixtureRequest, package: Path, model_folder: Path) -> Executable:
    """Small ones, in every number format that there are kernels for."""
    from inlay.flow import BuildOptions, build

    if request.param == "float32":
        return load_package(package)
    options = BuildOptions(max_length=ROOM, max_batch=4, weights=request.param)
    made = once_a_run(request.param, lambda path: build(str(model_folder), path / "package", options))
    return load_package(made / "package")


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 256), k=length)


def _scores(executable: Executable, prompt: list[int], cuts: list[int], *others: list[int]) -> list[torch.Tensor]:
    """What a prompt that is cut there gives, and the likeliest tokens after it, with other prompts beside it."""
    session = Session(executable, 1 + len(others))
    rows = torch.tensor([prompt, *others])
    found = [session.advance(rows[:, start:stop], is_prefill=True) for start, stop in pairwise((0, *cuts, len(prompt)))]
    scores = found[-1]
    made = []
    for _ in range(ANSWER):
        made.append(scores[0])
        scores = session.advance(scores.argmax(-1, keepdim=True))
    return [*made, scores[0]]


@pytest.mark.parametrize("length", [1, 2, 17, 40, 150])
def test_chunks_and_batches(executable: Executable, length: int) -> None:
    prompt = _prompt(length, length)
    wanted = _scores(executable, prompt, [])
    for size in (1, 3, 16, 32, 64):
        found = _scores(executable, prompt, list(range(size, length, size)))
        assert all(map(torch.equal, found, wanted)), f"in chunks of {size}"
    for count in (1, 2, 3):
        others = [_prompt(length, 100 + number) for number in range(count)]
        for cuts in ([], [length // 2] if length > 1 else []):
            found = _scores(executable, prompt, cuts, *others)
            assert all(map(torch.equal, found, wanted)), f"beside {count} others"


@pytest.mark.parametrize("chunk", [1, 16, 32, 64])
def test_engine(executable: Executable, chunk: int, package: Path) -> None:
    """Texts of requests that come and go are those each gets alone; all have a beginning in common."""
    text = Engine.open(package).text
    engine = Engine(
        executable, text, EngineSettings(block_size=8, max_prefill_tokens=chunk, max_prefill_only_tokens=max(chunk, 16))
    )
    rng, shared = random.Random(chunk), _prompt(50, 7)
    requests = [
        Request((*shared[: rng.choice([0, 24, 50])], *_prompt(rng.randrange(1, 60), seed)), max_tokens=ANSWER)
        for seed in range(16)
    ]
    requests += requests[::3]
    answers: list[RequestHandle] = []
    while len(answers) < len(requests) or engine._running or engine._waiting:
        answers += [engine.submit(each) for each in requests[len(answers) :][: rng.randrange(3)]]
        engine.step()
    for request, answer in zip(requests, answers, strict=True):
        wanted = generate(SequenceSession(executable), text, request.prompt, Sampling(), max_tokens=ANSWER)
        assert [piece.token for piece in answer] == [piece.token for piece in wanted], request
    assert engine.counts()["prefix_cache_hits"] > 4


def test_what_was_said_is_read_anew(executable: Executable, package: Path) -> None:
    """The second turn of a conversation: rows of the answer were made one by one, and are not taken for a prompt's."""
    text = Engine.open(package).text
    engine = Engine(executable, text, EngineSettings(block_size=8, max_prefill_tokens=64))
    prompt = tuple(_prompt(40, 1))
    first = engine.submit(Request(prompt, max_tokens=30, ignore_eos=True))
    while engine.step():
        pass
    said = [piece.token for piece in first]
    request = Request((*prompt, *said, *_prompt(5, 2)), max_tokens=ANSWER, ignore_eos=True, logprobs=0)
    second = engine.submit(request)
    while engine.step():
        pass
    assert second.cached_tokens == 40
    fresh = Engine(executable, text, EngineSettings(block_size=8, cache_bytes=0))
    third = fresh.submit(request)
    while fresh.step():
        pass
    assert [(piece.token, piece.logprobs) for piece in second] == [(piece.token, piece.logprobs) for piece in third]
