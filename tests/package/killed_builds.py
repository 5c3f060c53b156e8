"""Builds that are killed: `python killed_builds.py MODEL PACKAGE OTHER FOLDER TRIES CALL …` prints what they left.

Everything is imported, captured and lowered once; each try is a fork that writes the whole package, as `inlay.build`
does, with libraries that were compiled before: compiling touches nothing of the package. PACKAGE is what is built;
OTHER is a package of the same model with other weights, which lies there already.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from inlay import flow
from inlay.errors import PackageError
from inlay.frontend import capture, open_model
from inlay.lowering.aoti import CompiledLibrary, StateAccess
from inlay.package import writer
from inlay.package.loader import load_package, read_manifest
from tests.small_packages import ROOM, greedy

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPTS = torch.tensor([[5, 6, 7], [9, 9, 9]])
BEFORE = ("nothing", "another version", "the same version")


class Builder:
    """Builds PACKAGE again and again, without compiling."""

    def __init__(self, model: str, package: Path) -> None:
        options = flow.BuildOptions(max_length=ROOM, max_batch=4)
        source = open_model(model)
        prepared = flow.prepare(capture(source), options)
        program, records = flow.transform(prepared, options)
        assert source.load_tokenizer is not None
        tokenizer = source.load_tokenizer()
        source = replace(source, load_tokenizer=lambda: tokenizer)
        self.lowered = flow.lower_program(program, options)
        self.contents = flow._contents(source, model, prepared, records)
        self.libraries = list(_libraries(package))

    def build(self, path: Path) -> None:
        libraries = iter(self.libraries)
        patched: Any = writer
        patched.build_library = lambda program, states, level: next(libraries)
        writer.pack(self.lowered, path, self.contents)


def _libraries(package: Path) -> list[CompiledLibrary]:
    manifest, folder = read_manifest(package)
    found = []
    files: set[Path] = set()
    for bucket in reversed(manifest.buckets):  # what serves all sizes is made first
        for piece in bucket.pieces:
            file = folder / piece.file
            if file.suffix == ".so" and file not in files:
                files.add(file)
                accesses = tuple(StateAccess(**{"reads": "", "writes": ""} | each) for each in piece.accesses)
                nodes = json.loads(file.with_suffix(".json").read_text())["nodes"]
                source = file.with_suffix(".cpp").read_text()
                found.append(CompiledLibrary(file.read_bytes(), source, nodes, piece.constants, accesses))
    return found


def forked(work: Callable[[], None]) -> tuple[int, int]:
    """A process that does this, and a pipe that tells when it begins."""
    readable, writable = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writable, b".")
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    os.close(writable)
    return process, readable


def killed_after(work: Callable[[], None], seconds: float) -> bool:
    """Whether it was killed; it may have been faster."""
    process, readable = forked(work)
    os.read(readable, 1)
    os.close(readable)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    return _ended(process)


def killed_before_call(work: Callable[[], None], number: int, names: list[str]) -> bool:
    """Killed right before its so-manyeth of these calls of `os`; False: it makes fewer."""

    def dying() -> None:
        left = number

        def counting(real: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return real(*args, **kwargs)

            return call

        for name in names:
            setattr(os, name, counting(getattr(os, name)))
        work()

    process, readable = forked(dying)
    os.close(readable)
    return _ended(process)


def _ended(process: int) -> bool:
    status = os.waitpid(process, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"the build failed by itself: {code}"
    return code != 0


class Tries:
    """What a killed build left behind, try after try."""

    def __init__(self, builder: Builder, package: Path, other: Path, folder: Path) -> None:
        self.builder, self.folder = builder, folder
        self.before = {"nothing": None, "another version": other, "the same version": package}
        self.tokens = {"new": self._tokens(package), "old": self._tokens(other)}
        assert self.tokens["new"] != self.tokens["old"]
        self.left: Counter[str] = Counter()
        self.count = 0

    def _tokens(self, path: Path) -> list[list[int]]:
        return greedy(load_package(path, verify=True), PROMPTS, 4).tolist()

    def __call__(self, before: str, killed: Callable[[Callable[[], None]], bool]) -> bool:
        """Build over what was there before; is what is left one of the two, whole?"""
        path = self._prepared(before)
        was_killed = killed(lambda: self.builder.build(path))
        found = self._found(path)
        if not was_killed:
            assert found == "new", f"a build that ended left {found}"
        assert found in {"nothing": ("none", "new"), "another version": ("old", "new")}.get(before, ("new",)), (
            f"over {before}, a killed build left {found}"
        )
        self.left[f"{before}: {'killed' if was_killed else 'ended'}, {found}"] += 1
        if was_killed and self.count % 10 == 0:
            self._sweeps(path)
        shutil.rmtree(path, ignore_errors=True)
        return was_killed

    def _prepared(self, before: str) -> Path:
        """A folder with what is there before the build."""
        self.count += 1
        path = self.folder / str(self.count)
        earlier = self.before[before]
        if earlier is not None:
            marks = shutil.ignore_patterns(".verified")
            shutil.copytree(earlier, path, symlinks=True, copy_function=os.link, ignore=marks)
        return path

    def duration(self, before: str) -> float:
        """How long a build takes that nobody kills."""
        path = self._prepared(before)
        start = time.perf_counter()
        process, readable = forked(lambda: self.builder.build(path))
        os.close(readable)
        assert not _ended(process)
        return time.perf_counter() - start

    def _found(self, path: Path) -> str:
        try:
            tokens = self._tokens(path)
        except PackageError as error:
            if "is not an Inlay package" not in str(error):
                raise
            return "none"
        return next(name for name, expected in self.tokens.items() if expected == tokens)

    def _sweeps(self, path: Path) -> None:
        """The next build finds nothing in its way, and leaves nothing of the one that died."""
        process, readable = forked(lambda: self.builder.build(path))
        os.close(readable)
        assert not _ended(process)
        assert self._found(path) == "new"
        assert sorted(each.name for each in path.iterdir()) == ["current", "versions"]
        assert len(list((path / "versions").iterdir())) == 1
        self.left["swept by the next build"] += 1


def main(model: str, package: Path, other: Path, folder: Path, count: int, calls: list[str]) -> None:
    torch.set_num_threads(1)
    builder = Builder(model, package)
    builder.build(folder / "first")
    assert read_manifest(folder / "first")[1].name == read_manifest(package)[1].name, "the same build, the same bytes"
    tries = Tries(builder, package, other, folder)
    gc.freeze()
    rng = random.Random(0)
    whole = {before: sorted(tries.duration(before) for _ in range(3))[1] for before in BEFORE}
    made = killed = 0
    while killed < count and made < 4 * count:
        before = BEFORE[made % 3]
        seconds = rng.uniform(0, whole[before])
        killed += tries(before, lambda work, seconds=seconds: killed_after(work, seconds))  # type: ignore[misc]
        made += 1
    at_random = dict(tries.left)
    tries.left.clear()
    places = {}
    for before in BEFORE:
        number = 0
        while tries(before, lambda work, number=number: killed_before_call(work, number, calls)):  # type: ignore[misc]
            number += 1
        places[before] = number
    print(json.dumps({"whole": whole, "at random": at_random, "before calls": dict(tries.left), "places": places}))


if __name__ == "__main__":
    package, other, folder = map(Path, sys.argv[2:5])
    main(sys.argv[1], package, other, folder, int(sys.argv[5]), sys.argv[6:])
