"""Blocks on disk: what is read is what was written, by the same package and for the same tenant, or nothing."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.package.files import lock
from inlay.package.loader import load_package
from inlay.program.bindings import Binding, Role
from inlay.runtime import Sampling
from inlay.runtime.kv import disk, prefix_cache
from inlay.runtime.kv.block import digest_block
from inlay.runtime.kv.disk import BlockFiles, identity
from inlay.runtime.kv.events import CacheMirror
from inlay.runtime.kv.memory import KVMemory
from inlay.runtime.request import Request, RequestHandle
from tests.runtime.engines import opening, random_prompt
from tests.runtime.single_request import alone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.runtime.engine import Engine
    from tests.runtime.engines import Open

BLOCK, SIZE, MINE = 8, 1000, b"m" * 32
FILE = SIZE + 44


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Idle threads of OpenMP would spin on cores that other tests need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def opened(package: Path, tmp_path: Path) -> Iterator[Open]:
    """Engines that are not started, with one folder: the test takes their steps."""
    with opening(package, block_size=BLOCK, disk_folder=tmp_path / "kv", disk_bytes=1 << 26) as open_engine:
        yield open_engine


def _request(length: int, seed: int = 0, **more: Any) -> Request:
    return Request(random_prompt(length, seed), **{"max_tokens": 3, "ignore_eos": True, **more})


def _ask(engine: Engine, request: Request) -> tuple[list[int], int]:
    """Its tokens, and how many of its prompt were cached, when all files are written."""
    answer = engine.submit(request)
    while engine.step():
        pass
    _wait(engine._files)
    return [piece.token for piece in answer], answer.cached_tokens


def _wait(files: BlockFiles | None) -> None:
    """Until its thread has done what there was to do."""
    assert files is not None
    done = threading.Event()
    files._add(done.set)
    assert done.wait(60)


def _open(folder: Path, limit: int = 1 << 20, by: bytes = MINE, size: int = SIZE) -> BlockFiles:
    return BlockFiles(folder, limit, by, size)


def _digest(number: int) -> bytes:
    return digest_block(None, [number])


def _data(number: int, size: int = SIZE) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def _write(files: BlockFiles, *numbers: int) -> None:
    for number in numbers:
        files.write(_digest(number), _data(number, files.block_bytes))
        _wait(files)


def _names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


@pytest.mark.parametrize(
    "kinds",
    [
        [("float32", 2, 16)],
        [("bfloat16", 1, 8), ("bfloat16", 1, 8), ("float16", 3, 4)],
        [("int8", 5, 7), ("float32", 1, 1), ("int8", 5, 7)],
        [("float64", 4, 32)] * 3,
    ],
)
def test_any_states_come_back_to_the_bit(tmp_path: Path, kinds: list[tuple[str, int, int]]) -> None:
    rows = [
        Binding(f"state_{number}", Role.INPUT, "", dtype, (2, heads, 64, head))
        for number, (dtype, heads, head) in enumerate(kinds)
    ]
    written, found = (KVMemory(rows, BLOCK, (4,), 2) for _ in range(2))
    files = _open(tmp_path, 1 << 24, size=written.block_bytes)
    for group in written._groups:
        group.pools[0].view(torch.uint8).random_(256)  # NaN too
    for index in range(4):
        files.write(_digest(index), written.pack(0, index))
    files.close()
    files = _open(tmp_path, 1 << 24, size=written.block_bytes)
    for index in range(4):
        data = files.read(_digest(index))
        assert data is not None
        found.unpack(index, data)
    for one, other in zip(written._groups, found._groups, strict=True):
        assert torch.equal(one.pools[0].view(torch.uint8), other.pools[0].view(torch.uint8))
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}
    files.close()


def test_another_engine_goes_on_with_them(opened: Open, tmp_path: Path) -> None:
    """Greedy and drawn tokens and their probabilities are those of a cold start. Events tell of what was read."""
    requests = [
        _request(100, 1, logprobs=2, max_tokens=12),
        _request(150, 2, sampling=Sampling(temperature=0.8, seed=5), max_tokens=12),
        Request(
            (*random_prompt(100, 1)[:60], *random_prompt(30, 3)),
            max_tokens=12,
            ignore_eos=True,
            logprobs=1,
            salt="mine",
        ),
    ]

    def run(engine: Engine) -> tuple[list[int], list[Any]]:
        answers = [engine.submit(request) for request in requests]
        while engine.step():
            pass
        pieces = [[(each.token, each.logprobs) for each in answer] for answer in answers]
        return [answer.cached_tokens for answer in answers], pieces

    first = opened()
    cold, wanted = run(first)
    first.close()
    engine = opened()
    mirror = CacheMirror(engine.event_log.snapshot().blocks)
    cached, found = run(engine)
    assert (cold, cached) == ([0, 0, 0], [96, 144, 88])
    assert found == wanted
    counts = engine.counts()
    assert counts["disk_tokens"] == counts["cached_tokens"] == sum(cached)
    assert counts["disk_bytes"] == sum(each.stat().st_size for each in (tmp_path / "kv").iterdir())
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    for _, event in engine.event_log.read(0):
        mirror.apply(event)
    assert engine.cache is not None
    assert set(mirror.blocks) == {block.hash for block in engine.cache}


def test_what_memory_has_no_room_for(opened: Open) -> None:
    """Random requests with a cache of ten blocks, and a second level of five, get what each gets alone."""
    per_block = opened()._memory.block_bytes
    engine, rng = opened(cache_bytes=10 * per_block, host_bytes=5 * per_block), random.Random(3)
    shared = random_prompt(90, 9)
    requests = [
        Request(
            (*shared[: rng.choice([0, 30, 60, 90])], *random_prompt(rng.randrange(1, 60), rng.randrange(9))),
            max_tokens=rng.randrange(1, 9),
            salt=rng.choice(["", "other"]),
            ignore_eos=True,
        )
        for _ in range(60)
    ]
    answers: list[RequestHandle] = []
    while len(answers) < len(requests) or engine._running or engine._waiting:
        for request in requests[len(answers) :][: rng.randrange(3)]:
            answers.append(engine.submit(request))
            if rng.random() < 0.1:
                answers[-1].cancel()
        engine.step()
    done = 0
    for request, answer in zip(requests, answers, strict=True):
        tokens = [piece.token for piece in answer]
        if not answer.is_cancelled:
            assert tokens == alone(engine._package, engine.text, request)[0]
            done += 1
    assert done > 30
    assert engine.counts()["disk_tokens"] > 100
    assert engine.counts()["fallback.disk_block_damaged"] == 0


def test_a_long_prefix_is_read_in_parts(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get a token in every step meanwhile."""
    wanted, _ = _ask(opened(), _request(200))
    monkeypatch.setattr(prefix_cache, "READ_BYTES", 1)
    engine = opened()
    talking = engine.submit(_request(5, 1, max_tokens=100))
    for _ in range(3):
        engine.step()
    before = engine.counts()
    answer = engine.submit(_request(200))
    while engine.counts()["disk_tokens"] < 24 * BLOCK:
        before = engine.counts()
        engine.step()
        after = engine.counts()
        assert after["generation_tokens"] > before["generation_tokens"]
        assert after["disk_tokens"] - before["disk_tokens"] in (0, BLOCK)
        assert after["prompt_tokens"] == before["prompt_tokens"]
    talking.cancel()
    while engine.step():
        pass
    assert ([piece.token for piece in answer], answer.cached_tokens) == (wanted, 192)
    assert engine.counts()["prompt_tokens"] - before["prompt_tokens"] == 200 - 192


DAMAGES = (
    *("flip", "cut", "grow", "empty", "noise", "zeros", "gone", "other block", "other tenant", "other package"),
    *("pipe", "link", "broken link", "folder"),
)


def _damage(path: Path, kind: str, others: dict[str, bytes], rng: random.Random) -> None:
    """Replace a file by one that is damaged or foreign."""
    data = bytearray(path.read_bytes())
    path.unlink()
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "grow":
        data += rng.randbytes(rng.randrange(1, 5000))
    elif kind == "empty":
        data.clear()
    elif kind == "noise":
        data[:] = rng.randbytes(len(data))
    elif kind == "zeros":
        start = rng.randrange(len(data) - 16)  # as after a power failure
        data[start:] = bytes(len(data) - start)
    elif kind in others:
        data[:] = others[kind]
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        target = path.with_name("elsewhere")
        target.write_bytes(data)
        path.symlink_to(target)
    elif kind == "broken link":
        path.symlink_to("nowhere")
    elif kind == "folder":
        path.mkdir()
    if not path.is_symlink() and not path.exists() and kind != "gone":
        path.write_bytes(data)


def test_damaged_and_foreign_files_are_refused(opened: Open, tmp_path: Path) -> None:
    """Each of 500 is a miss: the prompt is read up to there, and answered as if nothing was cached."""
    folder, request = tmp_path / "kv", _request(49, max_tokens=1)
    engine = opened()
    wanted, _ = _ask(engine, request)
    files, cache = engine._files, engine.cache
    assert files is not None
    assert cache is not None
    names = [files.name(block.digest) for block in cache]
    whole = {name: (folder / name).read_bytes() for name in names}
    assert len(whole) == 6
    foreign = {}
    for kind, other, asked in (
        ("other tenant", engine, replace(request, salt="another")),
        ("other package", opened(disk_owner="another"), request),
    ):
        before = _names(folder)
        _ask(other, asked)
        foreign[kind] = [(folder / name).read_bytes() for name in sorted(_names(folder) - before)]
        assert len(foreign[kind]) == 6
    seed = random.SystemRandom().getrandbits(32)
    rng, damaged = random.Random(seed), 0
    for number in range(500):
        kind, place = DAMAGES[number % len(DAMAGES)], rng.randrange(6)
        path = folder / names[place]
        others = {"other block": whole[names[place - 1]]} | {each: rng.choice(foreign[each]) for each in foreign}
        _damage(path, kind, others, rng)
        damaged += kind != "gone"
        cache.clear()
        assert _ask(engine, request) == (wanted, place * BLOCK), (seed, number, kind, place)
        assert engine.counts()["fallback.disk_block_damaged"] == damaged, (seed, number, kind, place)
        if kind == "folder":
            path.rmdir()
            path.write_bytes(whole[path.name])
        assert path.read_bytes() == whole[path.name], "it is written again"
    cache.clear()
    assert _ask(engine, request) == (wanted, 48)


def test_tenants_never_share(opened: Open, tmp_path: Path) -> None:
    """Equal prompts of several salts have different files, as have different owners, and none of them names a salt."""
    folder, request = tmp_path / "kv", _request(81)
    engine = opened()
    wanted, seen = _ask(engine, request)[0], _names(folder)
    assert len(seen) == 10
    for salt in ("tenant", "tenant/mine", "other"):
        assert _ask(engine, replace(request, salt=salt)) == (wanted, 0)
        made = _names(folder) - seen
        assert len(made) == 10
        assert not any(salt.encode() in (folder / name).read_bytes() for name in made)
        seen |= made
    for settings in ({"disk_owner": "another"}, {"block_size": 16}):
        other = opened(**settings)
        assert _ask(other, request) == (wanted, 0)
        assert _ask(opened(**settings), request) == (wanted, 80), settings
    assert [_ask(opened(), replace(request, salt=salt))[1] for salt in ("", "tenant", "third")] == [80, 80, 0]


def test_all_that_numbers_depend_on_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {identity("version", 32, "cpu", "")}
    made |= {identity(*given) for given in (("other", 32, "cpu", ""), ("version", 16, "cpu", ""))}
    made |= {identity(*given) for given in (("version", 32, "cuda", ""), ("version", 32, "cpu", "me"))}
    for where, name, value in (
        ("inlay.machine", "cpu_name", lambda: "another"),
        ("inlay.machine", "cpu_features", lambda: ("another",)),
        ("torch", "get_num_threads", lambda: 77),
        ("torch", "__version__", "0.0"),
        ("inlay.runtime.kv.disk", "__version__", "0.0"),
        ("inlay.runtime.kv.disk", "FORMAT", 0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"{where}.{name}", value)
            made.add(identity("version", 32, "cpu", ""))
    assert len(made) == 11
    assert identity("version", 32, "cpu", "") in made


def test_the_version_is_that_of_the_package(package: Path) -> None:
    loaded = load_package(package)
    assert loaded.version == os.readlink(package / "current").removeprefix("versions/")


def test_the_least_recently_used_are_removed(tmp_path: Path) -> None:
    """The size never exceeds the limit. Of a chain, the last blocks go first."""
    files = _open(tmp_path, limit=32 * FILE)
    chain = list(range(20))
    _write(files, *chain)
    files.touch([_digest(number) for number in chain])
    _write(files, *range(20, 32))
    kept = {*range(32)}
    for number, gone in ((32, {17, 18, 19}), (33, set()), (34, set()), (35, {14, 15, 16})):
        _write(files, number)
        kept = (kept | {number}) - gone
        assert _names(tmp_path) == {files.name(_digest(each)) for each in kept}
        assert [each for each in range(36) if files.read(_digest(each)) is not None] == sorted(kept)
        assert sum(each.stat().st_size for each in tmp_path.iterdir()) == files.bytes == len(kept) * FILE
    files.close()


def test_a_use_counts(tmp_path: Path) -> None:
    files = _open(tmp_path)
    for number in range(3):
        _write(files, number)
        os.utime(tmp_path / files.name(_digest(number)), (1000 + number, 1000 + number))
    files.close()
    files = _open(tmp_path, limit=3 * FILE + FILE // 2)
    assert files.is_due(_digest(0))
    files.touch([_digest(0)])
    assert not files.is_due(_digest(0))
    _write(files, 3)
    assert [files.read(_digest(number)) is not None for number in range(4)] == [True, False, True, True]
    files.close()


def test_the_limit_holds_for_what_is_found(tmp_path: Path) -> None:
    """Files of other packages and processes count. Files with other names do not, and stay."""
    (tmp_path / "notes.txt").write_bytes(bytes(5000))
    (tmp_path / f"{'0' * 64}.txt").write_bytes(bytes(5000))
    files, other = _open(tmp_path), _open(tmp_path, by=b"o" * 32, size=300)
    _write(files, *range(10))
    _write(other, *range(5))
    files.close()
    other.close()
    files = _open(tmp_path, limit=4 * FILE)
    rest = {each for each in tmp_path.iterdir() if each.suffix == ".kv"}
    assert sum(each.stat().st_size for each in rest) == files.bytes <= 4 * FILE
    assert len(_names(tmp_path)) == len(rest) + 2
    assert not any(files.name(_digest(number)) in {each.name for each in rest} for number in range(7))
    files.close()


def test_several_writers_share_a_limit(tmp_path: Path) -> None:
    """Each looks at the folder after a sixteenth of the limit, so all of them exceed it by few of these."""
    limit = 64 * FILE
    writers = [_open(tmp_path, limit, by=bytes([number]) * 32) for number in range(3)]
    for number in range(100):
        for files in writers:
            _write(files, number)
            assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= limit + 3 * limit // 16
    for files in writers:
        assert files.counts["disk_writes"] == 100
        files.close()


WRITE = """
import sys, torch
from pathlib import Path
from inlay.runtime.kv.disk import BlockFiles
files = BlockFiles(Path(sys.argv[1]), 1 << 30, b"m" * 32, 1 << 20)
for number in range(250):
    files._write(files.name(bytes([number])), torch.full((1 << 20,), number, dtype=torch.uint8))
    print(number, flush=True)
"""


def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """What it has left is whole."""
    process = subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    process.kill()
    written = 20 + len(process.stdout.read().split())
    process.wait(60)
    process.stdout.close()
    files = _open(tmp_path, 1 << 30, size=1 << 20)
    assert all(name.endswith(".kv") for name in _names(tmp_path)), "what it had begun is gone"
    assert len(_names(tmp_path)) in (written, written + 1)
    for number in range(written):
        data = files.read(bytes([number]))
        assert data is not None
        assert set(data.unique().tolist()) == {number}
    files.close()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Not what a process writes that is alive. A pipe with such a name stops nobody."""
    files = _open(tmp_path)
    _write(files, 1)
    left, live = tmp_path / ".inlay-kv-left", tmp_path / ".inlay-kv-live"
    left.write_bytes(b"half")
    os.mkfifo(tmp_path / ".inlay-kv-pipe")
    with live.open("wb") as file:
        lock(file.fileno())
        other = _open(tmp_path)
        assert live.exists()
        assert not left.exists()
        assert other.read(_digest(1)) is not None
    for each in (files, other):
        each.close()


def test_a_process_that_starts_while_another_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what is being written for no leftover."""
    files, replace, others = _open(tmp_path), os.replace, []

    def replace_later(source: str, target: Path) -> None:
        others.append(_open(tmp_path))
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_later)
    _write(files, 1)
    assert len(others) == files.counts["disk_writes"] == 1
    assert others[0].read(_digest(1)) is not None
    for each in (files, *others):
        each.close()


def test_a_disk_that_fails_costs_nothing_else(opened: Open, tmp_path: Path) -> None:
    """A file that cannot be written, and a folder that is gone, are counted, and answers stay what they are."""
    engine = opened()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        wanted = [_ask(engine, _request(81, seed))[0] for seed in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert engine.counts()["fallback.disk_write_failed"] >= 20
    assert engine.counts()["disk_writes"] == 0
    assert _names(tmp_path / "kv") == set(), "no part of a file stays"
    assert _ask(engine, _request(81)) == (wanted[0], 80)
    assert engine.counts()["disk_writes"] == 10, "what could not be written is written with the next use"
    shutil.rmtree(tmp_path / "kv")
    assert engine.cache is not None
    engine.cache.clear()
    failed = engine.counts()["fallback.disk_write_failed"]
    assert [_ask(engine, _request(81, seed)) for seed in range(2)] == [(tokens, 0) for tokens in wanted]
    assert engine.counts()["fallback.disk_write_failed"] > failed


def test_a_writer_that_is_behind(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are dropped and counted while it is, and written when they are used again."""
    engine, free = opened(), threading.Event()
    files = engine._files
    assert files is not None
    monkeypatch.setattr(disk, "_QUEUE_BYTES", 4 * files.block_bytes)
    files._add(lambda: print(free.wait(60)))
    answer = engine.submit(_request(81))
    while engine.step():
        pass
    assert files._queued_bytes == 4 * files.block_bytes
    assert engine.counts()["fallback.disk_queue_full"] >= 6
    free.set()
    _wait(files)
    assert engine.counts()["disk_writes"] == 4
    monkeypatch.undo()
    assert _ask(engine, _request(81)) == ([piece.token for piece in answer], 80)
    assert engine.counts()["disk_writes"] == 10


def test_two_engines_with_one_folder(opened: Open) -> None:
    """They write and remove the same files at the same time; answers are those of each request alone."""
    per_file = opened()._memory.block_bytes + 44
    engines = [opened(cache_bytes=30 * per_file, disk_bytes=40 * per_file) for _ in range(2)]
    requests = [_request(20 + 9 * seed, seed % 7) for seed in range(14)]
    wanted = [alone(engines[0]._package, engines[0].text, request)[0] for request in requests]
    found: dict[int, list[list[int]]] = {}

    def run(number: int) -> None:
        order = random.Random(number).sample(range(len(requests)), len(requests)) * 3
        handles = [(each, engines[number].submit(requests[each], wait=True)) for each in order]
        found[number] = [tokens for _, tokens in sorted((each, [p.token for p in handle]) for each, handle in handles)]

    for engine in engines:
        engine.start()
    threads = [threading.Thread(target=run, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number] for number in range(2)] == [[tokens for tokens in wanted for _ in range(3)]] * 2
    for engine in engines:
        assert engine.counts()["fallback.disk_block_damaged"] == engine.counts()["fallback.disk_write_failed"] == 0
    assert sum(engine.counts()["disk_tokens"] for engine in engines) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disk_bytes": 6000}, r"A block on disk has 6.2 kB, but the limit is 6.0 kB"),
        ({"cache_bytes": 0}, "need a prefix cache in memory"),
        ({"disk_folder": Path(__file__, "kv")}, "Blocks cannot be kept in .*Not a directory"),
        ({"disk_folder": Path("/proc/inlay")}, "Blocks cannot be kept in /proc/inlay"),
    ],
)
def test_settings_that_cannot_work(opened: Open, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        opened(**settings)
