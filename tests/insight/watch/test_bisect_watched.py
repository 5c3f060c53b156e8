"""`inlay bisect --watch`: the match that makes a program fail."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from inlay import watch_startup
from inlay.cli.main import app
from inlay.errors import ExitCode, UsageError
from inlay.insight.watch import bisection, watch_patterns
from inlay.insight.watch.bisection import ALL, AppliedMatch, find_bad_match, read_matches
from inlay.testing.compiler import disable_caches

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

fast = pytest.mark.fast
Run = tuple[bool | None, list[AppliedMatch]]


class Program:
    """Three sites of two patterns: the replacement of sines is right, and that of exponentials is wrong."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.limits = folder, patch, list[int]()
        self.passes = PatternMatcherPass(pass_name="mine")
        self.inputs = [torch.tensor([0.5, 1.5])]
        with FakeTensorMode():
            example = [torch.empty(2)]
            register_replacement(lambda x: x.sin() * 2, lambda x: x.sin() + x.sin(), example, fwd_only, [self.passes])
            register_replacement(lambda x: x.exp() * 2, lambda x: x.exp() * 3, example, fwd_only, [self.passes])

    def model(self, x: torch.Tensor) -> torch.Tensor:
        return (((x.sin() * 2).exp() * 2).cos().sin() * 2).abs()

    def module(self) -> torch.fx.GraphModule:
        with FakeTensorMode():
            return fwd_only(lambda x: self.model(x), [torch.empty(2)])

    def run(self, limit: int) -> Run:
        folder = self.folder / str(len(self.limits))
        folder.mkdir()
        self.limits.append(limit)
        self.patch.setenv(watch_startup.VARIABLE, str(folder))
        self.patch.setenv(bisection.LIMIT, str(limit))
        module = self.module()
        with watch_patterns() as records:
            self.passes.apply(module)
        module.recompile()
        assert records[0].matches == min(limit, 3)
        assert not records[0].error
        good = torch.allclose(module(*self.inputs), self.model(*self.inputs))
        return good, read_matches(folder)


@fast
def test_the_match_with_the_wrong_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(tmp_path, monkeypatch)
    found = find_bad_match(program.run)
    assert found is not None
    assert program.limits[:2] == [0, ALL]
    (match,) = found.matches
    assert (match.pass_name, match.node, match.number) == ("mine", "mul_1", found.bad)
    assert found.good == found.bad - 1
    monkeypatch.delenv(bisection.LIMIT)
    count = len(list(tmp_path.rglob("*.jsonl")))
    assert program.passes.apply(program.module()) == 3
    assert len(list(tmp_path.rglob("*.jsonl"))) == count, "without the variable nothing is written"


@fast
def test_passes_of_torch_fx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(watch_startup.VARIABLE, str(tmp_path))
    monkeypatch.setenv(bisection.LIMIT, "1")
    module = torch.fx.symbolic_trace(lambda x: torch.cos(torch.sin(torch.cos(torch.sin(x)))))
    with watch_patterns():
        replaced = torch.fx.replace_pattern(module, lambda x: torch.cos(torch.sin(x)), lambda x: torch.tanh(x))
    assert len(replaced) == 1
    (match,) = read_matches(tmp_path)
    assert (match.number, match.node) == (1, "cos")


@pytest.mark.parametrize("random", [pytest.param(False, marks=fast), pytest.param(True, marks=pytest.mark.nightly)])
def test_what_inductor_requires_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random: bool) -> None:
    """Random numbers and writes of custom operators, which Inductor compiles only after its own passes."""
    monkeypatch.setenv(watch_startup.VARIABLE, str(tmp_path))
    monkeypatch.setenv(bisection.LIMIT, "0")

    def add_one(x: torch.Tensor) -> None:
        x.add_(1)

    with torch.library._scoped_library("inlay_bisect", "FRAGMENT") as library:
        library.define("add_one_(Tensor(a!) x) -> ()")
        library.impl("add_one_", add_one, "CompositeExplicitAutograd")

        def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            torch.ops.inlay_bisect.add_one_(x)
            return (torch.rand(4, 4) @ y if random else y) @ x

        torch.compiler.reset()
        with torch.no_grad(), disable_caches(), watch_patterns() as records:
            assert torch.compile(model)(torch.zeros(4, 4), torch.zeros(4, 4)).sum() == 0
    assert {record.name for record in records if record.matches} >= {"post_grad.decompose_auto_functionalized"}
    assert not read_matches(tmp_path)


def _matches(number: int) -> list[Any]:
    return [AppliedMatch(each, "mine", "search", f"node_{each}", "") for each in range(1, number + 1)]


def _codes(code: Callable[[int], int], total: int = 8) -> Callable[[int], Run]:
    return lambda limit: ({0: True, 125: None}.get(code(limit), False), _matches(min(limit, total)))


@fast
@pytest.mark.parametrize("first_bad", range(1, 9))
def test_every_place(first_bad: int) -> None:
    found = find_bad_match(_codes(lambda limit: int(limit >= first_bad)))
    assert found is not None
    assert (found.good, found.bad, [each.number for each in found.matches]) == (first_bad - 1, first_bad, [first_bad])
    assert found.runs <= 2 + 3


@fast
def test_runs_that_cannot_be_judged() -> None:
    found = find_bad_match(_codes(lambda limit: 125 if limit in (4, 5) else int(limit > 5)))
    assert found is not None
    assert (found.good, found.bad, len(found.matches)) == (3, 6, 3)


@fast
def test_a_match_that_two_processes_report_is_told_once() -> None:
    one = AppliedMatch(1, "mine", "search", "node_1", "")
    other = AppliedMatch(1, "mine", "search", "another", "")
    found = find_bad_match(lambda limit: (limit == 0, [one, one, other] if limit else []))
    assert found is not None
    assert found.matches == (one, other)


@fast
@pytest.mark.parametrize(
    ("code", "total", "problem"),
    [
        (lambda limit: 1, 3, "not good when no match is applied"),
        (lambda limit: 125 if limit else 0, 3, "With all matches, the program cannot be judged"),
        (lambda limit: int(limit > 0), 0, "It fails, but no match was applied"),
    ],
)
def test_nothing_can_be_found(code: Callable[[int], int], total: int, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        find_bad_match(_codes(code, total))


@fast
def test_a_good_program() -> None:
    assert find_bad_match(_codes(lambda limit: 0)) is None


@fast
def test_mistakes() -> None:
    for words in (["--watch", "--all", "--", "true"], ["one", "two"], ["--watch", "--", "no-such-program-here"]):
        refused = CliRunner().invoke(app, ["bisect", *words])
        assert refused.exit_code == ExitCode.USAGE, refused.output


PROGRAM = """
import sys
import torch
from torch._inductor import config
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode

def right(x, w):
    return (x @ w) @ w

def wrong(x, w):
    return (x @ x) @ w

passes = PatternMatcherPass(pass_name="mine")
with FakeTensorMode():
    example = [torch.empty(4, 4), torch.empty(4, 4)]
    register_replacement(right, lambda x, w: x @ (w @ w), example, fwd_only, [passes])
    register_replacement(wrong, lambda x, w: x @ w, example, fwd_only, [passes])

def model(x, w):
    y = ((x @ w) @ w).reshape(2, 8).reshape(4, 4)
    y = ((y @ y) @ w).reshape(2, 8).reshape(4, 4)
    return (y @ w) @ w

inputs = torch.eye(4) * 2, torch.ones(4, 4)
with torch.no_grad(), config.patch(post_grad_custom_post_pass=passes.apply):
    found, expected = torch.compile(model)(*inputs), model(*inputs)
if not torch.allclose(found, expected):
    sys.exit(f"wrong result: {found[0, 0]:g}, not {expected[0, 0]:g}")
"""


@pytest.mark.nightly
def test_a_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "inlay", "bisect", "--watch", "--json", "--", sys.executable, "program.py"]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert run.returncode == ExitCode.FAILED, run.stdout + run.stderr
    found = json.loads(run.stdout)
    (match,) = found["matches"]
    assert (match["pass_name"], match["pattern"], match["source"]) == ("mine", "wrong", "program.py:22")
    assert "bad  with all matches: exit code 1: wrong result: " in run.stderr
    assert "good with the first 0 matches" in run.stderr
