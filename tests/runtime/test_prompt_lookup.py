"""Speculation by prompt lookup: drafts change the number of calls, and no token, text or logprob."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.lowering.buckets import find_shared_slot_problem
from inlay.package.loader import load_package
from inlay.runtime import FinishReason, Sampling
from inlay.runtime.engine import Engine
from inlay.runtime.grammar import Grammar
from inlay.runtime.prompt_lookup import MATCH_SIZES, Drafter, PromptLookup
from inlay.runtime.request import Request, RequestHandle
from inlay.runtime.settings import EngineSettings
from inlay.runtime.speculation import CallCosts, choose_lengths
from tests.runtime.engines import spoil
from tests.shared_cache import once_a_run
from tests.small_packages import ROOM

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from inlay.package.loader import LoadedPackage


class Constant(CallCosts):
    """A call costs the same for any number of rows, so every draft pays."""

    def seconds(self, rows: int) -> float:
        return 1.0


class Proportional(CallCosts):
    """A row costs the same in any call, so no draft pays."""

    def seconds(self, rows: int) -> float:
        return float(rows)


@pytest.fixture(scope="module")
def loaded(package: Path) -> LoadedPackage:
    return load_package(package)


@pytest.fixture(scope="module")
def text(package: Path) -> Any:
    return Engine.open(package).text


def _engine(loaded: LoadedPackage, text: Any, costs: CallCosts | None = None, **settings: Any) -> Engine:
    small = {"block_size": 8, "max_prefill_tokens": 16, "max_prefill_only_tokens": 64, "max_waiting": 1000}
    engine = spoil(Engine(loaded, text, EngineSettings(**small | settings)))
    engine.speculation.costs = costs or Constant()
    return engine


def _answer(engine: Engine, requests: Sequence[Request], seed: int = 0) -> list[list[Any]]:
    """All outputs of requests that arrive at random steps, without times."""
    rng, handles = random.Random(seed), list[RequestHandle]()
    while len(handles) < len(requests) or engine._running or engine._waiting:
        handles += [engine.submit(each) for each in requests[len(handles) :][: rng.randrange(3)]]
        engine.step()
    counts = engine.counts()
    assert counts["fallback.call_failed"] == counts["fallback.step_failed"] == 0
    return [[(each.token, each.text, each.finish_reason, each.logprobs) for each in handle] for handle in handles]


def _repetitive(rng: random.Random, most: int = 90) -> tuple[int, ...]:
    """A prompt of a few phrases that come again and again."""
    phrases = [rng.choices(range(3, 256), k=rng.randrange(1, 9)) for _ in range(rng.randrange(1, 4))]
    prompt = list[int]()
    for _ in range(rng.randrange(1, 14)):
        prompt += rng.choice(phrases)
    return tuple(prompt[:most])


def _mixed(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            _repetitive(rng),
            rng.choice(
                [Sampling(), Sampling(), Sampling(repetition_penalty=1.1), Sampling(temperature=0.3, seed=number)]
            ),
            max_tokens=rng.randrange(1, 70),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, 2]),
            stop=rng.choice([(), (), ("e",), ("ab", "\n")]),
        )
        for number in range(count)
    ]


def _find_by_search(tokens: list[int], most: int) -> tuple[list[int], int]:
    end = len(tokens)
    for size in MATCH_SIZES:
        for stop in range(end - 1, size - 1, -1):
            if size <= end and tokens[stop - size : stop] == tokens[end - size :]:
                found = tokens[stop:]
                while len(found) < most:
                    found.append(found[len(found) - (end - stop)])
                return found[:most], size
    return [], 0


@pytest.mark.parametrize("seed", range(20))
def test_lookup_is_a_search(seed: int) -> None:
    """The latest occurrence of the longest match, in sequences that grow by any number of tokens."""
    rng = random.Random(seed)
    tokens, lookup, found = list[int](), PromptLookup(), 0
    vocabulary = rng.choice([2, 5, 10])
    for _ in range(60):
        tokens += rng.choices(range(vocabulary), k=rng.choice([0, 1, 1, 3, 10]))
        most = rng.randrange(9)
        draft = lookup.find(tokens, most)
        assert draft == _find_by_search(tokens, most)
        found += bool(draft[1])
    assert found > 10


def test_choice_is_the_best_of_all() -> None:
    """No other number of rows has more expected tokens per second, and no limit is exceeded."""
    rng = random.Random(3)
    for _ in range(200):
        costs = CallCosts()
        for rows in rng.sample(range(1, 17), 5) * 2:
            costs.note(rows, rng.uniform(1, 1 + rows / 4))
        drafts = [(rng.randrange(8), rng.random()) for _ in range(rng.randrange(1, 5))]
        limit = rng.randrange(1, 17)

        def rate(counts: Sequence[int], costs: CallCosts = costs, drafts: Any = drafts) -> float:
            expected = sum(chance**n for (_, chance), each in zip(drafts, counts, strict=True) for n in range(each + 1))
            return expected / costs.seconds(len(drafts) + sum(counts))

        chosen = choose_lengths(drafts, limit, costs)
        assert all(0 <= each <= most for each, (most, _) in zip(chosen, drafts, strict=True))
        assert sum(chosen) <= max(0, limit - len(drafts))
        for _ in range(30):
            other = [rng.randrange(most + 1) for most, _ in drafts]
            if sum(other) <= limit - len(drafts):
                assert rate(other) <= rate(chosen) * (1 + 1e-9)


def test_costs_are_measured_again() -> None:
    """One slow call does not disable speculation for ever."""
    costs = CallCosts()
    for rows, seconds in ((1, 1.0), (8, 100.0)) * 2:
        costs.note(rows, seconds)
    assert choose_lengths([(7, 0.9)], 8, costs) == [0]
    for _ in range(1000):
        costs.note(1, 1.0)
    assert choose_lengths([(7, 0.9)], 8, costs) == [7]
    costs.note(2, 0.0)
    costs.note(2, 0.0)
    assert costs.seconds(2) > 0, "a coarse clock"


def test_drafts_that_are_rejected_are_tried_again() -> None:
    drafter, tokens = Drafter(), [1, 2, 3, 4] * 3
    assert drafter.draft(tokens, 2) == ([1, 2], 0.5)
    for _ in range(10):
        drafter.note(0, rejected=True)
    rejected = drafter.draft(tokens, 2)[1]
    assert rejected < 0.2
    for _ in range(200):
        drafter.draft(tokens, 2)
    assert 0.4 < drafter.draft(tokens, 2)[1] < 0.5
    for _ in range(10):
        drafter.note(5, rejected=False)
    assert drafter.draft(tokens, 2)[1] > 0.9


def test_rows_of_one_slot(loaded: LoadedPackage) -> None:
    """A call with several rows of a slot gives the bits of single steps, and leaves the same cache."""
    rng = random.Random(1)

    def call(state: Any, tokens: list[int], slots: list[int], lengths: list[int]) -> torch.Tensor:
        given = {"input_ids": [[each] for each in tokens], "slots": slots, "lengths": lengths}
        return loaded({**state, **{name: torch.tensor(value) for name, value in given.items()}})["logits"][:, -1]

    for _ in range(30):
        single, several = loaded.new_state(), loaded.new_state()
        length, slot = rng.randrange(1, ROOM - 4), rng.randrange(3)
        tokens = rng.choices(range(3, 256), k=length + 3)
        for state in (single, several):
            for value in state.values():
                value.fill_(float("nan"))
            for used in (slot, 3):
                given = {"input_ids": [tokens[:length]], "slots": [used], "lengths": [0]}
                loaded({**state, **{name: torch.tensor(each) for name, each in given.items()}}, is_prefill=True)
        wanted = [call(single, [tokens[length + n]], [slot], [length + n]) for n in range(3)]
        wanted.append(call(single, [5], [3], [length]))
        order = rng.sample(range(4), 4)
        rows = [(tokens[length + n], slot, length + n) if n < 3 else (5, 3, length) for n in order]
        found = call(several, [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
        assert all(torch.equal(found[place], wanted[n][0]) for place, n in enumerate(order))
        for name in single:
            for used, filled in ((slot, length + 3), (3, length + 1)):
                assert torch.equal(single[name][used, :, :filled], several[name][used, :, :filled])
    with pytest.raises(UsageError, match="Two sequences use the same slot"):
        call(single, [1, 2], [1, 1], [3, 3])


def test_code_that_does_more_with_a_state(loaded: LoadedPackage) -> None:
    """Rows share a slot only if a piece writes all of them and attention reads them then: recorded by the compiler."""
    buckets = [bucket for bucket, _ in loaded.buckets]
    states = [row.name for row in loaded.bindings.state]
    assert find_shared_slot_problem(buckets, states) == loaded.shared_slot_problem == ""

    def change(edit: Any) -> str:
        pieces = tuple(replace(piece, accesses=tuple(edit(piece.accesses))) for piece in buckets[0].pieces)
        return find_shared_slot_problem([replace(buckets[0], pieces=pieces)], states)

    assert "was not recorded" in change(lambda accesses: ())
    assert "was not recorded" in change(lambda accesses: [each for each in accesses if "reads" not in each])
    assert "in another way than attention" in change(reversed)
    assert "in another way than attention" in change(lambda all_: [{**each, "reads": "4*batch"} for each in all_])
    assert "in another way than attention" in change(lambda all_: [{**each, "unknown": "code"} for each in all_])
    assert "after attention has read" in change(lambda all_: [*all_, *all_])


@pytest.mark.parametrize("slots", [1, 3])
def test_answers_are_those_without_drafts(loaded: LoadedPackage, text: Any, slots: int) -> None:
    seed, requests = slots, _mixed(30, slots)
    plain, drafting = _engine(loaded, text, speculation=0), _engine(loaded, text, slots=slots)
    assert _answer(drafting, requests, seed) == _answer(plain, requests, seed)
    before, after = plain.counts(), drafting.counts()
    assert (before["drafted_tokens"], before["accepted_tokens"]) == (0, 0)
    assert after["drafted_tokens"] > after["accepted_tokens"] > 20
    assert after["generation_tokens"] == before["generation_tokens"]
    assert drafting.speculation.problem == ""
    assert plain.speculation.problem == "it is disabled"


def test_grammars(loaded: LoadedPackage, text: Any) -> None:
    """The mask of each row follows the token before it, also where the grammar repeats what was written."""
    rng = random.Random(4)
    grammars = [
        Grammar("regex", "(abcd ){8}end"),
        Grammar("regex", "[ab]{40}"),
        Grammar.json_schema({"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 3, "maxItems": 9}),
    ]
    requests = [
        Request(
            _repetitive(rng),
            Sampling() if number % 2 else Sampling(temperature=1.0, seed=number),
            max_tokens=rng.choice([20, 200]),
            grammar=rng.choice(grammars),
            logprobs=1,
        )
        for number in range(24)
    ]
    drafting = _engine(loaded, text)
    assert _answer(drafting, requests) == _answer(_engine(loaded, text, speculation=0), requests)
    assert drafting.counts()["accepted_tokens"] > 100


def test_ends_within_a_draft(loaded: LoadedPackage, text: Any) -> None:
    """max_tokens, the length of a slot, and stop strings end an answer at the same token."""
    grammar, prompt = Grammar("regex", "(abcdef){60}"), tuple(text.encode("abcdef" * 4))
    for count in range(8, 28):
        request = Request(prompt, max_tokens=count, grammar=grammar)
        engine = _engine(loaded, text)
        (made,) = _answer(engine, [request])
        assert (len(made), made[-1][2]) == (count, FinishReason.LENGTH)
        assert engine.counts()["accepted_tokens"] > 0
    request = Request(prompt, max_tokens=1000, grammar=grammar, stop=("fabcdefabcdefabc",))
    made, plain = (_answer(_engine(loaded, text, speculation=n), [request]) for n in (7, 0))
    assert made == plain
    assert made[0][-1][2] is FinishReason.STOP
    request = Request(prompt, max_tokens=1000, grammar=grammar)
    engine = _engine(loaded, text)
    (made,) = _answer(engine, [request])
    assert len(prompt) + len(made) == ROOM + 1
    assert [made] == _answer(_engine(loaded, text, speculation=0), [request])


def test_the_prefix_cache_holds_what_was_generated(loaded: LoadedPackage, text: Any) -> None:
    """A prompt that continues an answer with drafts gets the answer that it gets in a new engine."""
    first = Request(tuple(text.encode("abcabcabcabc")), max_tokens=40, ignore_eos=True)
    engine = _engine(loaded, text)
    (made,) = _answer(engine, [first])
    assert engine.counts()["drafted_tokens"] > 0
    again = Request((*first.prompt, *(each[0] for each in made), 7, 8), max_tokens=30, ignore_eos=True, logprobs=2)
    assert _answer(engine, [again]) == _answer(_engine(loaded, text, speculation=0), [again])
    assert engine.counts()["prefix_cache_hits"] == 1


def test_sequences_come_before_drafts(loaded: LoadedPackage, text: Any) -> None:
    """With as many sequences as rows there is no room for drafts, and no call has more rows than the package."""
    grammar = Grammar("regex", "(ab){100}")
    requests = [Request((5, 6), max_tokens=60 + 20 * number, grammar=grammar) for number in range(4)]
    engine, sizes = _engine(loaded, text), list[tuple[int, int, int]]()
    package = engine._package

    def watched(given: Any, *, is_prefill: bool) -> Any:
        if not is_prefill:
            sizes.append((len(given["slots"]), len(set(given["slots"].tolist())), len(engine._running)))
        return package(given, is_prefill=is_prefill)

    engine._package = watched
    handles = [engine.submit(each) for each in requests]
    while engine.step():
        pass
    assert [len(list(each)) for each in handles] == [60, 80, 100, 120]
    assert max(rows for rows, _, _ in sizes) == 4
    assert (4, 4, 4) in sizes
    assert (4, 1, 1) in sizes


def test_off_where_it_does_not_pay(loaded: LoadedPackage, text: Any) -> None:
    requests = _mixed(10, 7)
    engine = _engine(loaded, text, Proportional())
    assert _answer(engine, requests) == _answer(_engine(loaded, text, speculation=0), requests)
    assert engine.counts()["drafted_tokens"] == 0
    assert engine.speculation.problem == ""


def _watch_problem(engine: Engine, requests: Sequence[Request], plain: Engine) -> None:
    wanted = _answer(plain, requests)
    assert _answer(engine, requests) == wanted
    assert "last bits of the logits differ between calls of 1 and" in engine.speculation.problem
    assert engine.counts()["drafted_tokens"] == 0


def test_off_where_bits_depend_on_the_batch(loaded: LoadedPackage, text: Any) -> None:
    """The first verify call is compared with single steps; here one bit of a row is different in larger calls."""

    def rounding(given: Any, *, is_prefill: bool) -> Any:
        results = loaded(given, is_prefill=is_prefill)
        if len(given["slots"]) > 1:
            results["logits"].view(torch.int32)[:, -1, -1] ^= 1
        return results

    engine, plain = _engine(loaded, text), _engine(loaded, text, speculation=0)
    engine._package = plain._package = rounding
    _watch_problem(engine, [each for each in _mixed(10, 8) if each.logprobs is None], plain)


def test_off_where_rows_must_not_share_a_slot(
    loaded: LoadedPackage, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "shared_slot_problem", "it gathers slots")
    engine = _engine(loaded, text)
    assert engine.speculation.problem == "it gathers slots"
    _answer(engine, _mixed(5, 9))
    assert engine.counts()["drafted_tokens"] == 0
    given = {"input_ids": [[1], [2]], "slots": [1, 1], "lengths": [3, 4]}
    with pytest.raises(UsageError, match="Two sequences use the same slot"):
        loaded({**loaded.new_state(), **{name: torch.tensor(value) for name, value in given.items()}})


@pytest.mark.nightly
def test_weights_that_are_not_packed(model_folder: Path, text: Any) -> None:
    """torch's kernels add in another order for other numbers of rows."""
    from inlay.flow import BuildOptions, build

    options = BuildOptions(max_length=ROOM, max_batch=4, settings=("pack_weights.enabled=false",))
    made = once_a_run("not packed", lambda path: build(str(model_folder), path / "package", options))
    engine = _engine(load_package(made / "package"), text)
    _answer(engine, _mixed(10, 8))
    assert "last bits of the logits differ" in engine.speculation.problem


@pytest.mark.nightly
def test_a_thousand_prompts(loaded: LoadedPackage, text: Any) -> None:
    requests = _mixed(1000, 100)
    drafting, plain = _engine(loaded, text), _engine(loaded, text, speculation=0)
    assert _answer(drafting, requests) == _answer(plain, requests)
    assert drafting.counts()["accepted_tokens"] > 1000
