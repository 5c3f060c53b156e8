"""Delete each condition of transforms and analyses in turn, and check that a test or the fuzzer fails.

    python tools/condition_deletion.py                       # all files; exit code 1 if a deletion is not detected
    python tools/condition_deletion.py match_rope matcher    # only these files
    python tools/condition_deletion.py --list                # list the conditions

A condition is a `match.require(…)`, or an `if` that is an early exit: it returns nothing, a refusal or an existing
value, raises, or continues. The function without the condition runs in a new process, forked from one that has imported
everything. A deletion is detected if pytest ends with failed tests (exit code 1 only; other exit codes mean that
nothing was tested), or if the fuzzer finds a failure. Without a deletion, both must pass.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import cache
from itertools import groupby
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import pytest

import inlay.lowering.state.in_place_writes
from inlay.testing.fuzz.__main__ import run
from inlay.testing.fuzz.templates import Templates
from inlay.testing.review.mutants import (
    Condition,
    StatementDeleter,
    condition_statements,
    condition_text,
    is_refusal,
)
from inlay.transforms.base import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from types import FrameType

ROOT = Path(__file__).parents[1]
SOURCE = Path(inlay.__file__).parent
LIBRARY = sorted((SOURCE / "transforms" / "library").glob("[!_]*.py"))
REWRITE = [SOURCE / "rewrite" / name for name in ("rewriter.py", "pattern_search.py", "replacement.py", "matcher.py")]
FILES = (*LIBRARY, *REWRITE, *sorted((SOURCE / "analysis").rglob("[!_]*.py")))
GRAPHS, SEED = 150, 11
LONGEST = 1200
"""Timeout of a run in seconds; a deletion may cause an endless loop."""
HARNESS = "tests/transforms/library/test_cases.py"
BY_HAND = "tests/transforms/library/test_by_hand.py"
REFUSALS = "tests/transforms/library/test_insert_kv_cache_refusals.py"
PATTERNS = ["tests/rewrite", "tests/insight/test_explain.py", HARNESS]
MASKS = ["tests/analysis/test_masks.py", HARNESS, "-k", "mask or match_attention-"]
WRITES = [
    "tests/analysis/test_aliasing.py",
    "tests/analysis/test_auto_functionalized.py",
    "tests/lowering/state/test_defunctionalization.py",
    "tests/test_pass_fix_functionalization.py",
]
UPDATES = [
    "tests/analysis/test_state_updates.py",
    "tests/lowering/state",
    "-k",
    "(update or refus or state) and not compiled",
]
TESTS: dict[str, list[str]] = {
    **dict.fromkeys(("rewriter", "pattern_search", "replacement", "matcher"), PATTERNS),
    **dict.fromkeys(("classification", "derivation", "index_function", "inequalities", "operators"), MASKS),
    **dict.fromkeys(("aliasing", "auto_functionalized", "liveness"), WRITES),
    **dict.fromkeys(("state_updates", "storage_slices"), UPDATES),
    "sequence_axis": [REFUSALS],
    "position_ids": [REFUSALS],
    "insert_kv_cache": [
        BY_HAND,
        "tests/analysis/test_masks.py",
        HARNESS,
        REFUSALS,
        "-k",
        "insert_kv_cache or reaches_the_cache",
    ],
    "match_attention": ["tests/analysis/test_masks.py", HARNESS, BY_HAND, "-k", "mask or match_attention-"],
    "pack_weights": ["tests/transforms/library/test_pack_weights.py", HARNESS, "-k", "pack_weights"],
}
"""File → its tests; the default for a transform in the library is its cases in the harness."""
FAILED, PASSED = int(pytest.ExitCode.TESTS_FAILED), int(pytest.ExitCode.OK)
ENDLESS = 124


def find_guards(file: Path) -> list[Condition]:
    """Return every guard in a file, in order: the conditions of rules, and each `if` that is an early exit.

    An early exit returns a constant, an existing value or a refusal, raises, or continues. A line that ends with
    `# shortcut` only saves time and is not included.
    """
    lines = file.read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    found = {each.lineno: each for each in condition_statements(tree)}
    found |= {each.lineno: each for each in ast.walk(tree) if isinstance(each, ast.If) and _is_early_exit(each)}
    return [
        Condition(file, line, condition_text(each) or _test(each))
        for line, each in sorted(found.items())
        if not lines[line - 1].endswith("# shortcut")
    ]


def _is_early_exit(statement: ast.If) -> bool:
    *before, last = statement.body
    if statement.orelse or not all(isinstance(each, (ast.Expr, ast.Assign)) for each in before):
        return False
    match last:
        case ast.Raise() | ast.Continue() | ast.Return(value=None | ast.Constant() | ast.JoinedStr() | ast.Name()):
            return True
        case ast.Return(value=ast.Call(func=ast.Name(id=name))):
            return name in ("MaskKind", "CopyRequired", "IneligibleState", "Mismatch") or is_refusal(last)
        case ast.Return(value=ast.Tuple(elts=parts) | ast.List(elts=parts)):
            return all(isinstance(part, (ast.Constant, ast.Name)) for part in parts)
    return False


def _test(statement: ast.stmt) -> str:
    return f"if {ast.unparse(statement.test)}" if isinstance(statement, ast.If) else ""


@contextlib.contextmanager
def delete_condition(condition: Condition) -> Iterator[None]:
    """Remove a condition from the code of its function, for all callers."""
    tree = ast.parse(condition.file.read_text())
    code = compile(ast.fix_missing_locations(StatementDeleter(condition.line).visit(tree)), str(condition.file), "exec")
    owner = _function(condition)
    changed = _code(code, owner.__code__)
    before, owner.__code__ = owner.__code__, changed
    try:
        yield
    finally:
        owner.__code__ = before


def _function(condition: Condition) -> Any:
    """Return the outermost imported function or method that contains a condition."""
    module = next(each for each in sys.modules.values() if getattr(each, "__file__", None) == str(condition.file))
    for node in ast.parse(condition.file.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        for each in inside:
            if isinstance(each, ast.FunctionDef) and each.lineno <= condition.line <= (each.end_lineno or 0):
                owner = getattr(module, node.name) if isinstance(node, ast.ClassDef) else module
                found = inspect.getattr_static(owner, each.name)
                return inspect.unwrap(getattr(found, "__func__", getattr(found, "fget", None) or found))
    raise LookupError(f"{condition.location} is not in a function")


def _code(module: CodeType, like: CodeType) -> CodeType:
    todo = [module]
    while todo:
        each = todo.pop()
        if each.co_qualname == like.co_qualname:
            return each
        todo += [const for const in each.co_consts if isinstance(const, CodeType)]
    raise LookupError(f"{like.co_qualname} does not exist any more")


def tests_of(file: Path) -> list[str]:
    """Return the pytest arguments for a file; test files that do not exist are omitted."""
    chosen = TESTS.get(file.stem, [HARNESS, BY_HAND, "-k", f"{file.stem}-"])
    return [each for each in chosen if not each.startswith("tests/") or (ROOT / each).exists()]


def forked(work: Callable[[], int]) -> int:
    """Run `work` in a forked process without output and return its exit code."""
    child = os.fork()
    if child == 0:
        code = 99
        with contextlib.suppress(BaseException):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            code = work()
        os._exit(code)
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return ENDLESS


def test(chosen: list[str], *plugins: object) -> int:
    """Run tests in this process and return the exit code of pytest."""
    os.chdir(ROOT)
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen], plugins))


class LineRecorder:
    """A pytest plugin that records which tests reach the first line of which condition, fastest first."""

    def __init__(self, conditions: list[Condition], output: Path) -> None:
        self.lines = defaultdict[str, set[int]](set)
        for each in conditions:
            self.lines[str(each.file)].add(each.line)
        self.output, self.reached = output, defaultdict[str, list[tuple[float, str]]](list)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        seen: set[tuple[str, int]] = set()

        def trace_lines(frame: FrameType, event: str, _: Any) -> Any:
            file = frame.f_code.co_filename
            if frame.f_lineno in self.lines[file]:
                seen.add((file, frame.f_lineno))
            return trace_lines

        sys.settrace(lambda frame, *_: trace_lines if frame.f_code.co_filename in self.lines else None)
        start = time.monotonic()
        try:
            return (yield)
        finally:
            sys.settrace(None)
            for file, line in seen:
                self.reached[f"{file}:{line}"].append((time.monotonic() - start, item.nodeid))

    def pytest_sessionfinish(self) -> None:
        self.output.write_text(json.dumps({at: [each for _, each in sorted(ids)] for at, ids in self.reached.items()}))


def run_control(files: list[Path]) -> tuple[int, dict[str, list[str]]]:
    """Run the common tests of files without a deletion. Return the exit code of pytest, and by file and line of each
    condition the tests that reach it in this process. Other tests may reach it in threads or processes."""
    conditions = [each for file in files for each in find_guards(file)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "reached.json")
        code = forked(lambda: test(tests_of(files[0]), LineRecorder(conditions, output)))
        return code, json.loads(output.read_text()) if output.exists() else {}


@cache
def templates(name: str) -> Templates:
    """Return cached templates, because their capture takes longer than the rest."""
    return Templates([name] if name else [], seed=SEED)


def fuzzed_transform(file: Path) -> str:
    """Return the transform that the fuzzer runs for a file; an empty name means all."""
    return file.stem if file.stem in registry() else {"classification": "match_attention"}.get(file.stem, "")


def fuzz(name: str) -> int:
    """Run the fuzzer in this process; return 1 if it found a failure."""
    with tempfile.TemporaryDirectory() as folder:
        only = [name] if name else []
        report = run(GRAPHS, SEED, only, Path(folder), templates=templates(name), transforms=only)
    return FAILED if report["failures"] else PASSED


def warm_up() -> None:
    """Trace every pattern once before forking."""
    from inlay.rewrite.pattern_cache import PATTERNS
    from inlay.rewrite.rule import DTYPES
    from inlay.transforms.base import PatternTransform

    for cls in registry().values():
        if issubclass(cls, PatternTransform):
            for alternative in cls().alternatives(set(DTYPES)):
                PATTERNS.get(alternative.function, alternative.example)


def noticed_by(condition: Condition, reached_by: list[str]) -> str:
    """Return what fails without the condition: a test, the fuzzer or nothing; or how else the run ended.

    Tests that reach the condition run first, then all tests of the file.
    """

    def broken(work: Callable[[], int]) -> int:
        def there() -> int:
            with delete_condition(condition):
                return work()

        return forked(there)

    code = broken(lambda: test(reached_by)) if reached_by else PASSED
    if code == PASSED:
        code = broken(lambda: test(tests_of(condition.file)))
    if code == PASSED:
        code = broken(lambda: fuzz(fuzzed_transform(condition.file)))
        return {PASSED: "nothing", FAILED: "the fuzzer", ENDLESS: "never ends"}.get(code, f"exit code {code}")
    return {FAILED: "a test", ENDLESS: "never ends"}.get(code, f"exit code {code}")


def main(names: list[str]) -> int:
    """Delete each condition in turn; return 1 if a deletion is not detected."""
    files = [file for file in FILES if not names or file.stem in names or names == ["--list"]]
    if names == ["--list"]:
        for condition in (each for file in files for each in find_guards(file)):
            print(f"{condition.location}: {condition.text}")
        return 0
    warm_up()
    totals: Counter[str] = Counter()
    print("| condition | text | deletion detected by |\n|---|---|---|", flush=True)
    for _, group in groupby((file for file in files if find_guards(file)), tests_of):
        same = list(group)
        code, reached_by = run_control(same)
        problem = f"its tests end with exit code {code}" if code != PASSED else ""
        if not problem and any(fuzz(name) != PASSED for name in sorted(set(map(fuzzed_transform, same)))):
            problem = "the fuzzer finds a failure"
        if problem:
            print(f"\n{same[0].stem}: {problem} without a deletion.")
            return 2
        for condition in (each for file in same for each in find_guards(file)):
            result = noticed_by(condition, reached_by.get(f"{condition.file}:{condition.line}", []))
            totals[result] += 1
            print(f"| {condition.location} | {condition.text.replace('|', '/')} | {result} |", flush=True)
    print(f"\n{totals.total()} conditions; detected by: {dict(totals.most_common())}")
    return int(any(result not in ("a test", "the fuzzer") for result in totals))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests")]
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        raise SystemExit
    raise SystemExit(main(sys.argv[1:]))
