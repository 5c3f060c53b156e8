"""Packages whose windows have slots with the rows of the window and of a call: sessions, the engine, the copy proof."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.config import resolve_config
from inlay.errors import UsageError
from inlay.flow import BuildOptions, build
from inlay.frontend import capture
from inlay.lowering.lower import compile_lowered, lower
from inlay.package.copy_proof import prove
from inlay.package.loader import LoadedPackage, load_package
from inlay.package.memory_traffic import _pages_of
from inlay.runtime import Sampling, Session
from inlay.runtime.engine import Engine
from inlay.runtime.grammar import Grammar
from inlay.runtime.request import Request, RequestHandle
from inlay.runtime.settings import EngineSettings
from inlay.transforms.pass_manager import configure, run
from tests.models import random_model
from tests.runtime.engines import random_prompt, spoil
from tests.runtime.single_request import CLOSE, alone, first_difference
from tests.runtime.test_prompt_lookup import Constant
from tests.shared_cache import once_a_run
from tests.small_packages import FIELDS, greedy
from tests.text_models import byte_tokenizer, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.lowering.executable import Executable
    from inlay.runtime.text_codec import TextCodec

LENGTH, PREFILL, WINDOW, ROWS, SLOTS = 400, 33, 16, 64, 4
MODEL: dict[str, Any] = FIELDS | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(MODEL)


SETTINGS = ("enabled=true", f"max_length={LENGTH}", f"max_batch={SLOTS}", f"max_prefill={PREFILL}")


@pytest.fixture(scope="module")
def folder(model: Any) -> Path:
    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)

    return once_a_run("windows", save)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return text_of(byte_tokenizer(), tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def built(folder: Path) -> LoadedPackage:
    options = BuildOptions(max_length=LENGTH, max_batch=SLOTS, settings=(f"insert_kv_cache.{SETTINGS[-1]}",))
    return load_package(once_a_run("rings", lambda path: build(str(folder), path / "package", options)) / "package")


@pytest.fixture(scope="module", params=["eager", pytest.param("package", marks=pytest.mark.nightly)])
def package(folder: Path, request: pytest.FixtureRequest) -> Executable:
    if request.param == "package":
        found: Executable = request.getfixturevalue("built")
        return found
    config = resolve_config(settings=[f"insert_kv_cache.{each}" for each in SETTINGS])
    return compile_lowered(lower(run(capture(str(folder)), configure(config))[0], ["length=1"]), "eager")


def _engine(package: Executable, text: TextCodec, **settings: Any) -> Engine:
    return spoil(Engine(package, text, EngineSettings(**settings)))


def _answers(engine: Engine, *requests: Request) -> list[RequestHandle]:
    handles = [engine.submit(request, wait=False) for request in requests]
    while engine.step():
        pass
    return handles


def _check_same(package: Executable, one: torch.Tensor, two: torch.Tensor) -> None:
    """Compiled steps give the same bits however a prompt is cut; eager ones nearly do."""
    bound = 0.0 if isinstance(package, LoadedPackage) else 1e-4
    torch.testing.assert_close(one, two, rtol=bound, atol=bound)


def test_sizes(package: Executable, text: TextCodec) -> None:
    """A layer with a window holds the rows of the window and of a call; the other all that a sequence may have."""
    assert package.cache is not None
    assert (package.cache.max_seq_len, package.max_prefill) == (LENGTH, PREFILL)
    assert [row.shape[2] for row in package.bindings.state] == [ROWS, ROWS, LENGTH, LENGTH]
    row_bytes = 2 * 16 * 4  # two heads of 16 numbers in float32
    engine = _engine(package, text, cache_bytes=0)
    assert engine.memory_bytes == SLOTS * 2 * (ROWS + LENGTH) * row_bytes


def test_a_session_gives_the_tokens_of_the_model(package: Executable, model: Any) -> None:
    """Prompts longer than a call, and four times through a ring."""
    prompts = torch.tensor([random_prompt(100, 1), random_prompt(100, 2)])
    tokens = torch.cat([prompts, greedy(package, prompts, 180)], 1)
    with torch.no_grad():
        scores = model(tokens, use_cache=False).logits
    assert torch.equal(scores[:, 99:-1].argmax(-1), tokens[:, 100:])
    assert all(len(set(row[100:].tolist())) > 9 for row in tokens)


def test_a_wrong_token_in_a_later_call_appends_nothing(package: Executable) -> None:
    """Longer prompts take several calls, which check the tokens that they get."""
    session, prompt = Session(package), torch.tensor([random_prompt(60)])
    wrong = prompt.clone()
    wrong[0, 50] = 10**6
    with pytest.raises(UsageError, match="A token must be from 0 to"):
        session.advance(wrong)
    assert session.lengths == [0]
    _check_same(package, session.advance(prompt), Session(package).advance(prompt))


def test_chunks_change_no_bit(package: Executable) -> None:
    prompt = torch.tensor([random_prompt(300)])
    whole = Session(package).advance(prompt)
    session = Session(package)
    for part in torch.split(prompt, [1, 50, 7, 142, 100], 1):
        scores = session.advance(part, is_prefill=True)
    _check_same(package, scores, whole)


def test_the_engine_gives_what_each_request_gets_alone(package: Executable, text: TextCodec) -> None:
    """Blocks of the prefix cache are copied out of rings before they are overwritten, also where they wrap around."""
    shared = random_prompt(210, 7)
    requests = [
        Request((*shared[: 30 * number], *random_prompt(5 + 9 * number, number)), max_tokens=12, ignore_eos=True)
        for number in (7, 1, 5, 7, 2)
    ]
    for block in (8, 24):
        engine = _engine(package, text, block_size=block, max_prefill_tokens=16)
        handles = _answers(engine, *requests)
        assert engine.counts()["prefix_cache_hits"] >= 2
        assert engine.counts()["fallback.step_failed"] == engine.counts()["fallback.call_failed"] == 0
        for request, handle in zip(requests, handles, strict=True):
            wanted, ahead = alone(package, engine.text, request)
            first = first_difference([piece.token for piece in handle], wanted)
            assert first is None or ahead[first] < CLOSE, (block, len(request.prompt), first)


def test_a_hit_changes_no_bit(package: Executable, text: TextCodec) -> None:
    engine = _engine(package, text, block_size=8)
    request = Request(random_prompt(303), max_tokens=20, ignore_eos=True, logprobs=3)
    (first,) = _answers(engine, request)
    for value in engine._memory.state.values():
        value.fill_(float("nan"))
    (second,) = _answers(engine, request)
    assert (first.cached_tokens, second.cached_tokens) == (0, 296)
    one, two = ([(piece.token, piece.logprobs.logprob) for piece in each if piece.logprobs] for each in (first, second))
    assert len(one) == 20
    _check_same(package, torch.tensor(one), torch.tensor(two))


def test_blocks_from_disk_change_no_bit(
    package: Executable, text: TextCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "version", package.version or "eager")
    request, found = Request(random_prompt(303), max_tokens=20, ignore_eos=True, logprobs=3), []
    for cached in (0, 296):
        engine = _engine(package, text, block_size=8, disk_folder=tmp_path, disk_bytes=1 << 26)
        for value in engine._memory.state.values():
            value.fill_(float("nan"))
        (answer,) = _answers(engine, request)
        assert answer.cached_tokens == engine.counts()["disk_tokens"] == cached
        found.append(torch.tensor([(piece.token, piece.logprobs.logprob) for piece in answer if piece.logprobs]))
        engine.close()
    _check_same(package, *found)


def test_a_block_that_does_not_fit_in_a_ring(package: Executable, text: TextCodec) -> None:
    most = ROWS - PREFILL + 1
    _engine(package, text, block_size=most)
    _engine(package, text, block_size=most + 1, cache_bytes=0)
    with pytest.raises(UsageError, match="may be overwritten before it is copied") as caught:
        _engine(package, text, block_size=most + 1)
    assert f"at most {most}" in str(caught.value.remedy)
    _engine(package, text, block_size=most + 1, max_prefill_tokens=8, max_prefill_only_tokens=PREFILL - 1)


@pytest.mark.nightly
def test_drafts_in_rings(built: LoadedPackage, text: TextCodec) -> None:
    """Rejected rows overwrite only rows that have left the window, also where a slot wraps around."""
    rng = random.Random(5)
    phrases = [random_prompt(rng.randrange(2, 12), seed) for seed in range(4)]
    requests = [
        Request(sum((rng.choice(phrases) for _ in range(rng.randrange(3, 20))), ()), max_tokens=200, ignore_eos=True)
        for _ in range(8)
    ]
    requests += [
        Request(
            random_prompt(20 + 9 * seed, seed), Sampling(temperature=1.0, seed=seed), 150 + 50 * seed, grammar=grammar
        )
        for grammar in (Grammar("regex", "(abcde fgh ){40}"), Grammar("regex", "((ab|cd)e){200}"))
        for seed in range(4)
    ]
    found = []
    for speculation in (0, 7):
        engine = _engine(built, text, block_size=8, speculation=speculation, slots=2)
        engine.speculation.costs = Constant()
        found.append([[(piece.token, piece.text) for piece in each] for each in _answers(engine, *requests)])
    assert found[0] == found[1]
    counts = engine.counts()
    assert counts["drafted_tokens"] - 100 > counts["accepted_tokens"] > 100


@pytest.mark.nightly
def test_the_copy_proof(built: LoadedPackage) -> None:
    """Each step writes the rows that it adds, in rings too, and reads rows of its sequences only."""
    proof = prove(built)
    assert proof.holds, proof.problems
    assert {state.row_bytes for state in proof.states} == {2 * 16 * 4}


def test_pages_of_a_ring() -> None:
    """Positions that wrap around are the last and the first rows; more of them than rows are all."""
    cache = torch.empty(2, 1, 8, 1024)  # a page a row
    for first, end, rows in ((5, 8, {5, 6, 7}), (6, 11, {6, 7, 0, 1, 2}), (31, 33, {7, 0}), (3, 40, set(range(8)))):
        assert set(_pages_of(cache, [(1, first, end)]).nonzero().flatten().tolist()) == {8 + row for row in rows}
