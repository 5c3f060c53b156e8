"""Packages on many threads: every answer is the one of a single thread, and what cannot be shared is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay import Example
from inlay.errors import UsageError
from inlay.frontend import capture
from inlay.lowering.compiled_program import compile_program
from inlay.package.loader import load_package
from inlay.package.refit import refit
from inlay.runtime import Session
from tests.models import random_model
from tests.package import thread_stress
from tests.small_packages import FIELDS, ROOM
from tests.text_models import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = [(8, 120), pytest.param(32, 2000, marks=pytest.mark.nightly)]
"""Threads and generations."""


@pytest.fixture(scope="module")
def packages(package: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three packages: one compiled, and two more with other weights."""
    home = tmp_path_factory.mktemp("threads")
    made = [package]
    for seed in (1, 2):
        model = home / f"model{seed}"
        random_model(FIELDS, seed).save_pretrained(model)
        byte_tokenizer().save_pretrained(model)
        refit(package, str(model), output=home / f"package{seed}")
        made.append(home / f"package{seed}")
    return made


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("threads", "generations"), SIZES)
def test_generations_on_many_threads(packages: list[Path], count: int, threads: int, generations: int) -> None:
    """In a process of its own: what goes wrong here ends it."""
    sizes = [str(size) for size in (threads, generations, 0)]
    command = [sys.executable, thread_stress.__file__, *sizes, *map(str, packages[:count])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    found = json.loads(done.stdout)
    assert (found["generations"], found["wrong"]) == (generations, 0)


class Waiting:
    """A package whose calls wait until they may go on."""

    def __init__(self, package: Any) -> None:
        self.package, self.called, self.may_go_on = package, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.package, name)

    def __call__(self, given: Any, **options: Any) -> Any:
        self.called.set()
        assert self.may_go_on.wait(60)
        return self.package(given, **options)


def test_one_session_on_two_threads_is_refused(package: Path) -> None:
    waiting: Any = Waiting(load_package(package))
    session, found = Session(waiting), []
    other = threading.Thread(target=lambda: found.append(session.advance([[1, 2, 3]])))
    other.start()
    assert waiting.called.wait(60)
    for use in (lambda: session.advance([[4]]), session.restart):
        with pytest.raises(UsageError, match="Another thread is using this state"):
            use()
    waiting.may_go_on.set()
    other.join()
    assert session.lengths == [3]
    assert torch.equal(found[0], Session(load_package(package)).advance([[1, 2, 3]]))
    session.restart()
    assert session.lengths == [0]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"slots": [0, 4]}, "A slot must be from 0 to 3; got 4"),
        ({"slots": [-1, 0]}, "A slot must be from 0 to 3; got -1"),
        ({"slots": [1, 1]}, r"Two sequences use the same slot: \[1, 1\]"),
        ({"input_ids": [[1], [2]], "slots": [1, 1], "lengths": [7, 7]}, "Two sequences use the same slot"),
        ({"lengths": [0, -3]}, f"The length of a sequence must be from 0 to {ROOM - 2}; got -3"),
        ({"lengths": [ROOM - 1, 0]}, f"The length of a sequence must be from 0 to {ROOM - 2}; got {ROOM - 1}"),
        ({"input_ids": [[1, 2], [3, 320]]}, "A token must be from 0 to 319; got 320"),
        ({"input_ids": [[1, 2], [-1, 3]]}, "A token must be from 0 to 319; got -1"),
    ],
)
def test_indices_outside_are_refused(package: Path, changed: dict[str, Any], sentence: str) -> None:
    """Before anything is written: a slot of -1 would be the last one, where somebody else's sequence is."""
    loaded = load_package(package)
    state = {name: value.fill_(0.5) for name, value in loaded.new_state().items()}
    given = {"input_ids": [[1, 2], [3, 4]], "slots": [2, 3], "lengths": [0, 5]} | changed
    with pytest.raises(UsageError, match=sentence):
        loaded({**state, **{name: torch.tensor(value) for name, value in given.items()}})
    assert all((value == 0.5).all() for value in state.values())


@pytest.fixture
def slow_operator() -> Iterator[Any]:
    """An operator in Python, which a compiled library leaves to torch; others get a turn while it runs."""
    library: Any = torch.library.Library("inlay_test_threads", "FRAGMENT")
    library.define("slow(Tensor x) -> Tensor")

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return x * 2

    library.impl("slow", slow, "CPU")
    torch.library.register_fake("inlay_test_threads::slow", torch.empty_like, lib=library)
    yield torch.ops.inlay_test_threads.slow
    library._destroy()


@pytest.mark.nightly
def test_libraries_that_call_python(slow_operator: Any) -> None:
    """Whoever waits for such a library must not hold the interpreter that the library needs."""

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = slow_operator(x) + 1
            return result

    compiled = compile_program(capture(Example(Slow(), (torch.ones(4),))), "aot")
    wrong: list[int] = []

    def is_wrong(value: int) -> bool:
        return not torch.equal(compiled(torch.full((4,), float(value))), torch.full((4,), 2.0 * value + 1))

    def work(number: int) -> None:
        wrong.extend(value for value in range(number, number + 10) if is_wrong(value))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
