"""The fixture `pattern_lock`: what it compares, what a failure says, and that it costs nothing without use."""

from __future__ import annotations

import threading
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode

from inlay.transforms.lock import read_lock

pytest_plugins = ["pytester", "inlay.pytest_plugin"]
pytestmark = pytest.mark.fast
Failed = pytest.fail.Exception


def _search(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.exp() * 2 + w


def _apply(*factors: float) -> None:
    """Run a pass on a graph that has its pattern once for each factor; 2 is a match."""

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for factor in factors:
            x = (x.exp() * factor + w).sin()
        return x

    with FakeTensorMode():
        inputs = [torch.empty(3), torch.empty(3)]
        passes = PatternMatcherPass(pass_name="doubles")
        register_replacement(_search, lambda x, w: x - w, inputs, fwd_only, [passes])
        passes.apply(fwd_only(model, inputs))


@pytest.fixture
def lock(tmp_path: Path, pattern_lock: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock file of two matches, as the option writes it."""
    file = tmp_path / "passes.lock"
    with monkeypatch.context() as patched:
        patched.setattr(request.config.option, "update_pattern_locks", True, raising=False)
        with pattern_lock(file):
            _apply(2, 2)
    return file


def test_a_lock_file(lock: Path, pattern_lock: Any, request: pytest.FixtureRequest) -> None:
    (entry,) = read_lock(lock).models
    assert (entry.model, entry.transforms["doubles"].sites) == (request.node.nodeid, 2)
    with pattern_lock(str(lock)) as records:
        _apply(2, 2)
    assert [record.name for record in records] == ["doubles"]
    with pytest.raises(Failed) as failure, pattern_lock(lock):
        _apply(2, 3)
    first, second, last = str(failure.value).splitlines()
    assert first.startswith("doubles matched 1 sites, the lock has 2: 1 of 2 matched; add_1: 3 of 3 nodes: ")
    assert "other of mul_1 is 3; expected 2" in first
    assert second.startswith("doubles: _search matched 1 sites")
    assert last.startswith("To accept the changes: pytest --update-pattern-locks ")
    with pytest.raises(Failed, match="doubles: _search matched 0 sites, the lock has 2"), pattern_lock(lock):
        _apply()


def test_only_more_near_misses_are_no_failure(lock: Path, pattern_lock: Any) -> None:
    with pattern_lock(lock):
        _apply(2, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"passes.lock cannot be read. Write it: pytest --update-pattern-locks "),
        ("models: 3", r"is not a lock of format 3. Write it: pytest --update-pattern-locks "),
        ("format: 3\nmodels: []", "does not have one entry"),
    ],
)
def test_no_lock_file(text: str | None, message: str, pattern_lock: Any, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "passes.lock").write_text(text)
    with pytest.raises(Failed, match=message), pattern_lock(tmp_path / "passes.lock"):
        _apply(2)


def test_counts(pattern_lock: Any) -> None:
    with pattern_lock(doubles=2):
        _apply(2, 2)
    with (
        pytest.raises(Failed, match=r"doubles matched 1 .*, not 2: .* of mul_1 is 3; expected 2"),
        pattern_lock(doubles=2),
    ):
        _apply(2, 3)
    with pytest.raises(Failed, match=r"double did not run. Did you mean doubles\?"), pattern_lock(double=1):
        _apply(2)
    with pytest.raises(Failed, match="No pattern pass ran in the block"), pattern_lock(doubles=0):
        pass


def test_an_error_of_the_block_is_raised_as_it_is(pattern_lock: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="of the test"), pattern_lock(tmp_path / "passes.lock"):
        raise KeyError("of the test")
    with pytest.raises(TypeError, match="takes the name of a lock file, or counts"), pattern_lock():
        pass


def test_two_threads_run_one_after_the_other(pattern_lock: Any) -> None:
    """The blocks would see each other's matches if they ran at once."""
    inside = threading.Event()
    seen: dict[str, Any] = {}

    def first() -> None:
        with pattern_lock(doubles=1) as records:
            inside.set()
            second.join(0.5)
            seen["waited"] = second.is_alive()
            _apply(2)
        seen["first"] = len(records)

    def other() -> None:
        inside.wait()
        with pattern_lock(doubles=2) as records:
            _apply(2, 2)
        seen["second"] = len(records)

    second = threading.Thread(target=other)
    threads = [second, threading.Thread(target=first)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert seen == {"waited": True, "first": 1, "second": 1}


def test_caches_are_off_in_the_block_only(pattern_lock: Any) -> None:
    """A function that was compiled before, and is in the caches in memory and on disk, with a pass of post-grad."""
    passes = PatternMatcherPass(pass_name="products")
    with FakeTensorMode():
        inputs = [torch.empty(4, 4), torch.empty(4, 4)]
        register_replacement(lambda a, b: a @ b @ b, lambda a, b: b @ a, inputs, fwd_only, [passes])

    def call(other: bool) -> None:
        def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b @ (a if other else b)

        with torch.no_grad(), config.patch(post_grad_custom_post_pass=passes.apply):
            torch.compile(model)(torch.ones(4, 4), torch.ones(4, 4))

    call(False)
    for _ in range(2):
        with pattern_lock(products=1):
            assert not config.fx_graph_cache
            call(False)
    assert config.fx_graph_cache
    with pytest.raises(Failed, match=r"matched 0 sites, not 1: .*\(test_pytest_plugin.py:\d+\)\.$"):  # noqa: SIM117
        with pattern_lock(products=1):
            call(True)


def test_nothing_is_imported_until_it_is_used(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile("""
        import sys

        def test_alone(request):
            assert request.config.getoption("--update-pattern-locks") is False
            assert not {"torch", "yaml", "inlay.insight", "inlay.errors"} & set(sys.modules)
    """)
    pytester.runpytest_subprocess("-p", "inlay.pytest_plugin").assert_outcomes(passed=1)


@pytest.mark.nightly
def test_workers_of_xdist(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker writes and compares the files of its tests."""
    pytester.makepyfile("""
        import os
        import pytest

        @pytest.mark.parametrize("number", [1, 2])
        def test_passes(pattern_lock, number):
            from tests.test_pytest_plugin import _apply

            with pattern_lock(f"passes{number}.lock"):
                _apply(*map(int, os.environ["FACTORS"].split()))
    """)
    arguments = ("-p", "inlay.pytest_plugin", "-n", "2")
    monkeypatch.setenv("FACTORS", "2 2")
    pytester.runpytest_subprocess(*arguments, "--update-pattern-locks").assert_outcomes(passed=2)
    assert sorted(each.name for each in pytester.path.glob("*.lock")) == ["passes1.lock", "passes2.lock"]
    monkeypatch.setenv("FACTORS", "2 3")
    failed = pytester.runpytest_subprocess(*arguments)
    failed.assert_outcomes(failed=2)
    failed.stdout.fnmatch_lines(["doubles matched 1 sites, the lock has 2: * other of mul_1 is 3; expected 2."])


def test_it_is_installed_as_a_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["pytest11"].items()
    assert EntryPoint(name, value, "pytest11").load().pattern_lock
