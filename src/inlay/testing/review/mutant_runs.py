"""Find which tests kill which mutants of a transform: its own cases, and test files that pytest runs."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.testing import assert_rewrites, assert_untouched, program_of
from inlay.testing.review.mutants import EVERYWHERE, NOTHING, WRONG, make_mutants

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from inlay.testing.review.mutants import Mutant
    from inlay.transforms.base import Case, Transform


@dataclass
class MutantOutcome:
    """One test: why it fails without a mutant, and which mutants it kills."""

    name: str
    problem: str = ""
    killed: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class MutantReport:
    """The mutants of a transform and the tests that kill them."""

    tests: tuple[MutantOutcome, ...]
    mutants: tuple[str, ...]
    killed_by_fuzzer: frozenset[str] = frozenset()
    """Mutants that only the fuzzer killed."""

    @property
    def failing_tests(self) -> list[MutantOutcome]:
        """Tests that fail without a mutant."""
        return [each for each in self.tests if each.problem]

    @property
    def ineffective_tests(self) -> list[MutantOutcome]:
        """Tests that pass under every mutant."""
        return [each for each in self.tests if not each.problem and not each.killed]

    @property
    def survivors(self) -> list[str]:
        """Mutants that neither a test nor the fuzzer killed."""
        known = {name for each in self.tests for name in each.killed} | self.killed_by_fuzzer
        return [name for name in self.mutants if name not in known]

    def kill_count(self, breakage: str) -> int:
        """Return the number of tests that kill a mutant."""
        return sum(breakage in each.killed for each in self.tests)


def run_mutants(cls: type[Transform], files: Sequence[Path], on_step: Callable[[str], None]) -> MutantReport:
    """Run all tests of a transform, without a mutant and under every mutant."""
    broken = make_mutants(cls)
    on_step("running its cases")
    seen = list(_run_cases(cls, broken))
    if files:
        on_step("running its test files")
        seen += _run_files(files, broken)
    found = MutantReport(tuple(seen), tuple(each.name for each in broken))
    left = [each for each in broken if each.name in found.survivors and each.name not in (NOTHING, WRONG, EVERYWHERE)]
    fuzzed = frozenset(each.name for each in left if _fuzzer_kills(cls, each, on_step))
    return MutantReport(found.tests, found.mutants, fuzzed)


def _run_cases(cls: type[Transform], broken: Sequence[Mutant]) -> Iterator[MutantOutcome]:
    for kind, cases, run in (
        ("positive", cls.positive_cases(), _run_positive),
        ("negative", cls.negative_cases(), _run_negative),
    ):
        for case in cases:
            program = program_of(case.function, case.args, case.axes, case.prerequisites)
            seen = MutantOutcome(f"{kind}: {case.name}", _problem(run, cls, case, program))
            for breakage in broken if not seen.problem else ():
                with breakage():
                    if _problem(run, cls, case, program):
                        seen.killed.add(breakage.name)
            yield seen


def _run_positive(cls: type[Transform], case: Case, program: Any) -> None:
    sites = cls().apply(program.copy()).sites
    assert sites, "it does not match"
    assert_rewrites(program, cls(), args=case.args, sites=sites)


def _run_negative(cls: type[Transform], case: Case, program: Any) -> None:
    assert_untouched(program, cls(), args=case.args)


def _problem(run: Callable[..., None], /, *args: Any, **given: Any) -> str:
    """Return how a call fails; empty if it does not."""
    try:
        run(*args, **given)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # failures raised by pytest are not subclasses of Exception
        return _error_text(error)
    return ""


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _run_files(files: Sequence[Path], broken: Sequence[Mutant]) -> list[MutantOutcome]:
    try:
        import pytest
    except ModuleNotFoundError as error:
        raise UsageError("Test files are run by pytest, which is not installed.", "pip install pytest") from error
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        raise UsageError(f"There is no test file {missing[0]}.", "Name it with --tests.")
    seen: dict[str, MutantOutcome] = {}
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", *map(str, files)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = pytest.main(arguments, plugins=[_plugin(broken, seen)])
    if not seen:
        last = printed.getvalue().strip().splitlines()[-1:]
        raise UsageError(
            f"pytest ran no test in {', '.join(map(str, files))} (exit code {int(code)}): {' '.join(last)}"
        )
    return list(seen.values())


def _plugin(broken: Sequence[Mutant], seen: dict[str, MutantOutcome]) -> Any:
    """Return a pytest plugin that repeats every test under each mutant, with the same fixtures."""
    import pytest

    class Plugin:
        @pytest.hookimpl(wrapper=True)
        def pytest_pyfunc_call(self, pyfuncitem: Any) -> Generator[None, Any, Any]:
            mine = seen.setdefault(pyfuncitem.nodeid, MutantOutcome(pyfuncitem.nodeid))
            try:
                result = yield
            except BaseException as error:
                mine.problem = _error_text(error)
                raise
            names = pyfuncitem._fixtureinfo.argnames
            given = {name: pyfuncitem.funcargs[name] for name in names}
            for breakage in broken:
                with breakage():
                    if _problem(pyfuncitem.obj, **given):
                        mine.killed.add(breakage.name)
            return result

    return Plugin()


def _fuzzer_kills(cls: type[Transform], breakage: Mutant, on_step: Callable[[str], None]) -> bool:
    import random

    from inlay.testing.fuzz.checker import InvalidProgramError, check
    from inlay.testing.fuzz.generator import generate_program
    from inlay.testing.fuzz.templates import Templates

    on_step(f"fuzzing: it {breakage.name}")
    templates = Templates([cls.name])
    for index in range(_GRAPHS):
        program, inputs, _ = generate_program(random.Random(f"review/{index}"), templates.sample)
        try:
            with breakage():
                found = check(program, inputs, [cls.name]) is not None
            if found and check(program, inputs, [cls.name]) is None:
                return True
        except InvalidProgramError:
            continue
    return False


_GRAPHS = 60
