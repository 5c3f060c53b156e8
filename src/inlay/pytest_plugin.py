"""The pytest fixture `pattern_lock`: compare what graph passes match in a test with a lock file or with counts.

Every run of pytest imports this module, so Inlay and torch are imported only when a test uses the fixture.
"""

from __future__ import annotations

import shlex
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from inlay.insight.watch import PassRecord

_OPTION = "--update-pattern-locks"
_running = threading.RLock()
"""Held during a block: the passes of a process are watched together, so that two blocks would see each other's."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes lock files."""
    parser.getgroup("inlay").addoption(
        _OPTION, action="store_true", help="write the lock files of pattern_lock instead of comparing"
    )


@pytest.fixture
def pattern_lock(request: pytest.FixtureRequest) -> Callable[..., AbstractContextManager[list[PassRecord]]]:
    """Watch the graph passes of a block: `with pattern_lock("passes.lock"):` or `with pattern_lock(my_pass=2):`.

    The test fails if a pass matches another number of times, and prints the nearest miss: the node, the reason and the
    source line. The file is relative to the file of the test.
    """

    @contextmanager
    def lock(file: str | Path | None = None, /, **expected: int) -> Iterator[list[PassRecord]]:
        if (file is None) is (not expected):
            raise TypeError("pattern_lock takes the name of a lock file, or counts such as my_pass=2.")
        import torch

        from inlay.insight.watch.folder import sum_records
        from inlay.insight.watch.observer import watch_patterns
        from inlay.testing.compiler import disable_caches

        with _running, disable_caches(), watch_patterns() as records:
            torch.compiler.reset()  # what an earlier test compiled is compiled again
            yield records
        if not records:
            _fail("No pattern pass ran in the block: torch.compile compiles when the function is first called.")
        passes = sum_records(records)
        if file is None:
            _compare_counts(expected, passes)
        else:
            _compare_file(request, request.path.parent / file, passes)

    return lock


def _compare_counts(expected: Mapping[str, int], passes: Mapping[str, PassRecord]) -> None:
    from inlay.errors import suggest
    from inlay.insight.watch.folder import explain_miss

    lines = []
    for name, count in expected.items():
        if name not in passes:
            lines.append(f"{name} did not run. {suggest(name, passes) or 'Passes: ' + ', '.join(passes)}")
        elif (found := passes[name].count) != count:
            reason = explain_miss(passes, name) if found < count else ""
            lines.append(f"{name} matched {found} sites, not {count}{reason and f': {reason}'}.")
    if lines:
        _fail(*lines)


def _compare_file(request: pytest.FixtureRequest, file: Path, passes: Mapping[str, PassRecord]) -> None:
    from inlay.errors import UsageError
    from inlay.insight.watch.folder import compare_passes, lock_passes
    from inlay.transforms.lock import Lock, read_lock, versions

    if request.config.getoption(_OPTION, default=False):
        file.write_text(Lock(versions=versions(), models=[lock_passes(request.node.nodeid, passes)]).text())
        return
    update = f"pytest {_OPTION} {shlex.quote(request.node.nodeid)}"
    try:
        locked = read_lock(file)
        (entry,) = locked.models
    except (UsageError, ValueError) as error:
        problem = getattr(error, "problem", f"{file} does not have one entry.")
        _fail(f"{problem} Write it: {update}")
    differences = [each.message for each in compare_passes(entry, passes) if each.fails]
    if differences:
        _fail(*differences, *(each.message for each in locked.changes()), f"To accept the changes: {update}")


def _fail(*lines: str) -> NoReturn:
    pytest.fail("\n".join(lines), pytrace=False)
