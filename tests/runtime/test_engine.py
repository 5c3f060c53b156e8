"""The engine: many at once get what each would get alone, and whoever leaves takes nothing along."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from inlay.errors import InlayError, ProgramError, UsageError
from inlay.runtime import FinishReason, Sampling
from inlay.runtime.engine import Engine
from inlay.runtime.kv.events import CacheMirror, StoredEvent, UpdatedEvent
from inlay.runtime.outputs import TokenOutput, collect
from inlay.runtime.request import EngineClosedError, QueueFullError, Request, RequestHandle
from inlay.runtime.settings import EngineSettings
from tests.runtime.engines import opening, random_prompt
from tests.runtime.single_request import CLOSE, alone, first_difference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from tests.runtime.engines import Open

BLOCK = 8


@pytest.fixture
def opened(package: Path) -> Iterator[Open]:
    """Engines that are not started: the test takes their steps."""
    given = {"block_size": BLOCK, "max_prefill_tokens": 16, "max_prefill_only_tokens": 64, "speculation": 0}
    with opening(package, **given) as open_engine:
        yield open_engine


def _steps(engine: Engine, *answers: RequestHandle) -> list[list[int]]:
    """Tokens of answers, when all steps are taken."""
    while engine.step():
        pass
    return [[piece.token for piece in answer] for answer in answers]


def _alone(engine: Engine, request: Request) -> list[int]:
    return alone(engine._package, engine.text, request)[0]


def _mixed(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    shared = random_prompt(60, 99)
    return [
        Request(
            (*shared[: rng.choice([0, 20, 40, 60])], *random_prompt(rng.randrange(1, 90), number)),
            rng.choice([Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=number)]),
            max_tokens=rng.randrange(1, 40),
            priority=rng.choice([0, 0, 1]),
            ignore_eos=rng.random() < 0.5,
            salt=rng.choice(["", "tenant"]),
        )
        for number in range(count)
    ]


def test_many_at_once_get_what_each_gets_alone(opened: Open) -> None:
    """Requests of all lengths, drawn and greedy, with and without a common beginning, some cancelled on the way."""
    engine = opened(cache_bytes=300_000, host_bytes=100_000)
    requests, rng = _mixed(80, 1), random.Random(2)
    answers: list[RequestHandle] = []
    while len(answers) < len(requests) or engine._running or engine._waiting:
        for request in requests[len(answers) :][: rng.randrange(3)]:
            answers.append(engine.submit(request))
            answers[-1].is_cancelled = rng.random() < 0.05
        if rng.random() < 0.02 and answers:
            rng.choice(answers).cancel()
        engine.step()
    differing, completed = 0, 0
    for request, answer in zip(requests, answers, strict=True):
        made = list(answer)
        if made[-1].finish_reason is FinishReason.CANCELLED:
            continue
        completed += 1
        wanted, ahead = alone(engine._package, engine.text, request)
        first = first_difference([piece.token for piece in made], wanted)
        if first is not None:
            assert ahead[first] < CLOSE, (request, first)
            differing += 1
    counts = engine.counts()
    assert completed > 60
    assert differing <= 2
    assert counts["prefix_cache_hits"] > 10
    assert counts["finished.cancelled"] == len(requests) - completed
    assert counts["waiting_requests"] == counts["decode_sequences"] == counts["prefill_sequences"] == 0
    assert counts["fallback.call_failed"] == counts["fallback.step_failed"] == counts["padding_rows"] == 0
    assert engine.cache is not None
    assert not any(block.ref_count for block in engine.cache), "nobody relies on anything any more"


def test_a_hit_changes_no_bit(opened: Open) -> None:
    engine = opened()
    request = Request(random_prompt(150), max_tokens=20, ignore_eos=True, logprobs=3)
    first, second = engine.submit(request), None
    _steps(engine)
    second = engine.submit(request)
    rows = engine.counts()["rows"]
    _steps(engine)
    assert (first.cached_tokens, second.cached_tokens) == (0, 144)
    assert engine.counts()["rows"] - rows == 150 - 144 + 19, "what was found was not computed again"
    assert [(piece.token, piece.logprobs) for piece in first] == [(piece.token, piece.logprobs) for piece in second]


def test_a_hit_needs_the_same_tokens_and_the_same_salt(opened: Open) -> None:
    engine, prompt = opened(), random_prompt(64)
    _steps(engine, engine.submit(Request(prompt, max_tokens=1)))
    for other, cached in [
        (Request(prompt, max_tokens=1), 56),
        (Request(prompt, max_tokens=1, salt="another"), 0),
        (Request((7, *prompt), max_tokens=1), 0),
        (Request((*prompt[:30], *random_prompt(20, 5)), max_tokens=1), 24),
    ]:
        answer = engine.submit(other)
        _steps(engine, answer)
        assert answer.cached_tokens == cached


def test_what_was_pushed_out_comes_back_from_the_second_level(opened: Open) -> None:
    engine = opened(cache_bytes=20 * 2 * 2 * 2 * 16 * 4 * BLOCK, host_bytes=1 << 20)
    requests = [Request(random_prompt(100, seed), max_tokens=12, ignore_eos=True) for seed in range(4)]
    first = [_steps(engine, engine.submit(request)) for request in requests]
    answer = engine.submit(requests[0])
    again = _steps(engine, answer)
    assert again == first[0]
    assert answer.cached_tokens == 96
    moved = [event for _, event in engine.event_log.read(0) if isinstance(event, UpdatedEvent)]
    assert {event.level for event in moved} == {(0, 1), (1, 0)}


def test_events_tell_what_the_cache_holds(opened: Open) -> None:
    engine = opened(cache_bytes=200_000, host_bytes=50_000)
    start = engine.event_log.snapshot()
    _steps(engine, *[engine.submit(request) for request in _mixed(20, 3)])
    replica = CacheMirror(start.blocks)
    for _, event in engine.event_log.read(start.next):
        replica.apply(event)
    assert engine.cache is not None
    assert {hash_: (block.tokens, block.level) for hash_, block in replica.blocks.items()} == {
        block.hash: (block.tokens, block.level) for block in engine.cache
    }


def test_the_cache_may_be_full_of_what_is_in_use(opened: Open) -> None:
    per_block = 2 * 2 * 2 * 16 * 4 * BLOCK
    engine = opened(cache_bytes=4 * per_block)
    requests = [Request(random_prompt(80, seed), max_tokens=30, ignore_eos=True) for seed in range(4)]
    found = _steps(engine, *[engine.submit(request) for request in requests])
    assert found == [_alone(engine, request) for request in requests]
    assert engine.counts()["fallback.cache_full"] > 0


def test_without_a_cache(opened: Open) -> None:
    engine = opened(cache_bytes=0)
    request = Request(random_prompt(80), max_tokens=5, ignore_eos=True)
    assert _steps(engine, engine.submit(request)) == _steps(engine, engine.submit(request)) == [_alone(engine, request)]
    assert engine.counts()["blocks"] == engine.event_log.next == 0


def test_a_long_prompt_stalls_nobody(opened: Open) -> None:
    engine = opened()
    talking = engine.submit(Request(random_prompt(5), max_tokens=60, ignore_eos=True))
    for _ in range(4):
        engine.step()
    before = engine.counts()
    engine.submit(Request(random_prompt(200, 1), max_tokens=1))
    for _ in range(10):
        engine.step()
    after = engine.counts()
    assert after["generation_tokens"] - before["generation_tokens"] == 10, "a token in every step"
    assert 0 < after["prompt_tokens"] - before["prompt_tokens"] <= 10 * 16, "beside a chunk of the prompt"
    assert talking.is_cancelled is False


def test_cancel_takes_one_step(opened: Open) -> None:
    engine = opened()
    answers = [engine.submit(Request(random_prompt(20, seed), max_tokens=200, ignore_eos=True)) for seed in range(6)]
    for _ in range(8):
        engine.step()
    answers[0].cancel()
    answers[5].cancel()  # it still waits
    engine.step()
    assert {each.handle.id for each in engine._running.values()} | set(engine._waiting) == {1, 2, 3, 4}
    assert list(answers[0])[-1].finish_reason is list(answers[5])[-1].finish_reason is FinishReason.CANCELLED


def test_timeouts_end_what_runs_and_what_waits(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    for module in ("engine", "request"):
        monkeypatch.setattr(f"inlay.runtime.{module}.monotonic", lambda: now[0])
    engine = opened(slots=1)
    running = engine.submit(Request(random_prompt(4), max_tokens=100, ignore_eos=True, timeout=0.2))
    waiting = engine.submit(Request(random_prompt(4), timeout=0.1))
    for seconds in (100.0, 100.05, 100.15, 100.19):
        now[0] = seconds
        assert engine.step()
    assert list(waiting)[-1].finish_reason is FinishReason.TIMEOUT
    assert [each.handle for each in engine._running.values()] == [running]
    now[0] = 100.21
    assert not engine.step()
    pieces = list(running)
    assert pieces[-1].finish_reason is FinishReason.TIMEOUT
    assert 1 <= sum(piece.token is not None for piece in pieces) < 100


def test_those_with_priority_go_first(opened: Open) -> None:
    engine = opened(slots=1)
    plain = [engine.submit(Request(random_prompt(4, seed), max_tokens=3, ignore_eos=True)) for seed in range(3)]
    urgent = engine.submit(Request(random_prompt(4, 9), max_tokens=3, ignore_eos=True, priority=1))
    _steps(engine)
    last = {answer.id: list(answer)[-1].seconds + answer.arrival_time for answer in [*plain, urgent]}
    assert sorted(last, key=last.__getitem__) == [3, 0, 1, 2]


def test_too_many_are_refused_and_told_when_to_come_back(opened: Open) -> None:
    engine = opened(max_waiting=2)
    for seed in range(6):
        engine.submit(Request(random_prompt(4, seed), max_tokens=2))
    with pytest.raises(QueueFullError) as full:
        engine.submit(Request(random_prompt(4)))
    assert full.value.retry_after >= 1
    assert engine.counts()["rejected"] == 1
    _steps(engine)
    engine.submit(Request(random_prompt(4)))


@pytest.mark.parametrize(
    "request_",
    [
        Request(()),
        Request(random_prompt(257)),
        Request(random_prompt(4), max_tokens=0),
        Request(random_prompt(4), stop=("",)),
        Request(random_prompt(4), stop="END"),
    ],
)
def test_what_cannot_be_answered_is_refused_at_once(opened: Open, request_: Request) -> None:
    engine = opened()
    with pytest.raises(UsageError):
        engine.submit(request_)
    assert engine.counts()["accepted"] == 0


def test_a_sequence_may_fill_its_slot(opened: Open) -> None:
    engine = opened()
    request = Request(random_prompt(250), max_tokens=100, ignore_eos=True)
    made = collect(_pieces(engine, request))
    assert len(made.tokens) == 7, "six go in, and the last one need not"
    assert made.finish_reason is FinishReason.LENGTH
    assert list(made.tokens) == _alone(engine, request)


def _pieces(engine: Engine, request: Request) -> RequestHandle:
    answer = engine.submit(request)
    while engine.step():
        pass
    return answer


def test_a_failing_call_fails_those_in_it_and_nobody_else(opened: Open) -> None:
    engine = opened()
    package, fails = engine._package, threading.Event()

    def failing(given: dict[str, torch.Tensor], *, is_prefill: bool) -> Any:
        if fails.is_set():
            raise RuntimeError("out of luck")
        return package(given, is_prefill=is_prefill)

    engine._package = failing
    answer = engine.submit(Request(random_prompt(4), max_tokens=10, ignore_eos=True))
    engine.step()
    engine.step()
    fails.set()
    engine.step()
    fails.clear()
    with pytest.raises(ProgramError, match="out of luck"):
        list(answer)
    engine._package = package
    request = Request(random_prompt(4, 1), max_tokens=10, ignore_eos=True)
    assert _steps(engine, engine.submit(request)) == [_alone(engine, request)]
    assert engine.counts()["fallback.call_failed"] == 1


def test_scores_that_are_no_numbers_are_kept_from_the_cache(opened: Open) -> None:
    engine = opened()
    package = engine._package
    engine._package = lambda given, is_prefill: {"logits": package(given)["logits"] * float("nan")}
    answer = engine.submit(Request(random_prompt(20)))
    while engine.step():
        pass
    with pytest.raises(ProgramError, match="not finite"):
        list(answer)
    assert engine.counts()["finished.failed"] == 1


def test_in_a_thread_of_its_own(opened: Open) -> None:
    engine = opened()
    engine.start()
    requests = _mixed(12, 4)
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        found[number] = [piece.token for piece in engine.submit(requests[number])]

    threads = [threading.Thread(target=ask, args=[number]) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == len(requests)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.submit(requests[0])


def test_memory_is_taken_before_the_first_request(opened: Open) -> None:
    """A chunk of a prompt and a token for every slot, on full slots; what they write changes no answer."""
    engine, sizes = opened(), []
    package = engine._package

    def watched(given: Any, *, is_prefill: bool) -> Any:
        sizes.append((*given["input_ids"].shape, int(given["lengths"][0]), is_prefill))
        return package(given, is_prefill=is_prefill)

    engine._package = watched
    engine.start(warm=True)
    assert sizes == [(1, 16, engine.max_seq_len - 16, True), (engine.slots, 1, engine.max_seq_len - 1, False)]
    engine._package = package
    request = Request(random_prompt(40), max_tokens=12)
    assert [piece.token for piece in engine.submit(request)] == _alone(engine, request)


def test_a_package_that_fails_at_once(opened: Open) -> None:
    """Whoever starts the engine is told, and nobody waits for ever."""
    engine = opened()

    def broken(given: Any, *, is_prefill: bool) -> Any:
        raise ProgramError("It is broken.")

    engine._package = broken
    with pytest.raises(ProgramError, match="It is broken"):
        engine.start(warm=True)
    engine.close()


def test_in_an_event_loop(opened: Open) -> None:
    engine = opened()
    engine.start()
    requests = _mixed(10, 5)

    async def ask(request: Request) -> list[int]:
        return [piece.token async for piece in engine.submit(request, asyncio.get_running_loop())]

    async def all_of_them() -> list[list[int]]:
        return list(await asyncio.gather(*map(ask, requests)))

    made = asyncio.run(all_of_them())
    assert [len(tokens) > 0 for tokens in made] == [True] * len(requests)


def test_close_ends_what_is_under_way(opened: Open) -> None:
    engine = opened()
    engine.start()
    answers = [engine.submit(Request(random_prompt(4, seed), max_tokens=250, ignore_eos=True)) for seed in range(8)]
    engine.close()
    ends = [list(answer)[-1].finish_reason for answer in answers]
    assert FinishReason.CANCELLED in ends
    assert set(ends) <= {FinishReason.CANCELLED, FinishReason.LENGTH}


def test_all_memory_is_there_from_the_start(opened: Open) -> None:
    engine = opened()
    places = {name: value.data_ptr() for name, value in engine._memory.state.items()}
    blocks = [tensor.data_ptr() for group in engine._memory._groups for tensor in group.pools]
    _steps(engine, *[engine.submit(request) for request in _mixed(20, 6)])
    assert {name: value.data_ptr() for name, value in engine._memory.state.items()} == places
    assert [tensor.data_ptr() for group in engine._memory._groups for tensor in group.pools] == blocks
    held = sum(tensor.nbytes for group in engine._memory._groups for tensor in (group.slots, *group.pools))
    assert engine.memory_bytes == held


CODE = """
import json, sys
from inlay.runtime.engine import Engine
from inlay.runtime.settings import EngineSettings
from inlay.runtime.request import Request
engine = Engine.open(sys.argv[1], EngineSettings(block_size=8))
engine.start()
answers = [engine.submit(Request(tuple(range(3, 3 + 10 * size)), max_tokens=9)) for size in range(1, 9)]
print(sum(len(list(answer)) for answer in answers))
print([name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo", "transformers"))])
engine.submit(Request((5, 6), max_tokens=200))
"""


def test_nothing_is_compiled_and_a_process_may_end_amid_an_answer(package: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(package)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "[]"


@pytest.mark.nightly
def test_a_batch_is_filled_up_where_there_is_code_for_a_size(tmp_path: Path, model_folder: Path) -> None:
    from inlay.flow import BuildOptions, build

    build(
        str(model_folder), tmp_path / "package", BuildOptions(max_length=64, max_batch=4, buckets=("batch=4,length=1",))
    )
    engine = Engine.open(tmp_path / "package", EngineSettings(block_size=BLOCK))
    requests = [Request(random_prompt(10, seed), max_tokens=6, ignore_eos=True) for seed in range(3)]
    found = _steps(engine, *[engine.submit(request) for request in requests])
    assert found == [_alone(engine, request) for request in requests]
    counts = engine.counts()
    assert counts["padding_rows"] > 0
    assert counts["rows"] == counts["prompt_tokens"] + 3 * 5 + counts["padding_rows"]


def test_a_package_that_is_no_decoder_is_refused(package: Path) -> None:
    class Nothing:
        bindings = type("Bindings", (), {"state": ()})()
        initial: dict[str, Any] = {}  # noqa: RUF012

    with pytest.raises(InlayError, match="no KV cache"):
        Engine(Nothing(), None)  # type: ignore[arg-type]


def test_hashes_of_equal_prefixes_are_equal_in_two_engines(opened: Open) -> None:
    hashes = []
    for _ in range(2):
        engine = opened()
        _steps(engine, engine.submit(Request(random_prompt(40), max_tokens=1)))
        hashes.append([event.hash for _, event in engine.event_log.read(0) if isinstance(event, StoredEvent)])
    assert hashes[0] == hashes[1] != []


def test_outputs_and_an_error_that_arrived_before_anybody_reads() -> None:
    """A reader that starts late gets both, and one that waits gets a sign of life."""
    output = TokenOutput("a", 5, 0.0)

    async def read(answer: RequestHandle, heartbeat: float | None) -> list[list[TokenOutput]]:
        found = []
        try:
            async for batch in answer.batches(heartbeat):
                found.append(batch)
                if not batch:
                    answer.put([output], ProgramError("It failed."))
        except ProgramError:
            return found
        raise AssertionError("the error is lost")

    late = RequestHandle(0, Request((1,)))
    late.put([output])
    late.put([], ProgramError("It failed."))
    assert asyncio.run(asyncio.wait_for(read(late, None), 60)) == [[output]]
    assert asyncio.run(asyncio.wait_for(read(RequestHandle(1, Request((1,))), 0.01), 60)) == [[], [output]]
