"""A folder with the records of watched processes: one file for each process, one line for each call of a pass."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay import machine
from inlay.errors import UsageError, one_line
from inlay.insight.watch.changes import MOST_LEFT
from inlay.insight.watch.observer import add_listener
from inlay.insight.watch.records import MAX_RECORDS, PassRecord, parse_record
from inlay.transforms.lock import LockDifference, LockedModel, LockedTransform, compare
from inlay.watch_startup import SUFFIX, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_REMOVED = "removed "
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may hold it
_folder: Path | None = None
"""The folder that this process writes to."""
_counts: Counter[int] = Counter()
"""Number of records of this process, and of those that it was forked from."""


def start_recording() -> None:
    """Write the record of every pass of this process to the folder that the environment variable names."""
    global _folder
    with _lock:
        if _folder is None:
            _folder = Path(os.environ.get(VARIABLE, ".")).resolve()
            add_listener(_write)


def _write(record: PassRecord) -> None:
    process = os.getpid()
    with _lock:
        folder = _folder or Path(os.environ.get(VARIABLE, "."))
        folder.mkdir(parents=True, exist_ok=True)
        _counts[process] += 1
        dropped = max(_counts[process] - MAX_RECORDS, 0)
        kept = PassRecord(record.name, "", 0, 0, dropped=dropped) if dropped else record
        with (folder / f"{process}{'-dropped' * bool(dropped)}{SUFFIX}").open("w" if dropped else "a") as out:
            out.write(json.dumps(kept.to_json()) + "\n")


def read_records(folder: str | Path) -> list[PassRecord]:
    """Return the records of a folder, process by process."""
    found = []
    files = [each for each in Path(folder).glob(f"*{SUFFIX}") if each.is_file()]
    for file in sorted(files, key=lambda each: (each.stat().st_mtime, each.name)):
        try:
            *lines, last = file.read_text().split("\n")  # the last one has no end: its process was killed
            found += [parse_record(line) for line in lines]
            found += [parse_record(last)] if last and not lines else []
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {one_line(error)}.", "Watch the program again.") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file} has a line that is not a record.", "Watch the program again.") from error
    if not found:
        raise UsageError(f"{folder} has no records.", "No graph pass ran: is everything from Inductor's cache?")
    return found


def read_passes(folder: str | Path) -> dict[str, PassRecord]:
    """Return one record for each pass of a folder."""
    return sum_records(read_records(folder))


def sum_records(records: list[PassRecord]) -> dict[str, PassRecord]:
    """Return one record for each pass, over all graphs; findings of the same text are one."""
    merged: dict[str, PassRecord] = {}
    for name in dict.fromkeys(record.name for record in records):
        own = [record for record in records if record.name == name]
        findings = {(each.transform, each.text): each for record in own for each in record.findings}
        patterns, changes, num_left = Counter[str](), Counter[str](), Counter[str]()
        left: dict[str, dict[str, None]] = {}
        for record in own:
            patterns.update(record.patterns)
            changes.update(record.changes)
            num_left.update(record.num_left)
            for key, calls in record.left.items():
                left.setdefault(key, {}).update(dict.fromkeys(calls))
        merged[name] = PassRecord(
            *(name, "", max(record.num_patterns for record in own), sum(record.matches for record in own)),
            *(dict(patterns), tuple(place for record in own for place in record.places)),
            tuple(sorted(findings.values(), key=lambda each: (each.is_trivial, each.of - each.matched))),
            next((record.error for record in own if record.error), ""),
            dict(changes),
            {key: tuple(calls)[:MOST_LEFT] for key, calls in left.items()},
            dict(num_left),
            sum(record.dropped for record in own),
            own[-1].torch,
        )
    return merged


def lock_passes(name: str, passes: Mapping[str, PassRecord]) -> LockedModel:
    """Return the matches of watched passes as an entry of a lock file."""
    rows = {}
    for key, record in passes.items():
        if record.dropped and not record.count and not record.num_patterns:
            continue  # none of its records was kept
        rows[key] = LockedTransform(sites=record.count, misses=_reasons(record.near_misses))
        for change, number in sorted(record.changes.items()):
            if not record.num_patterns and change.startswith(_REMOVED):
                rows[f"{key}: {change}"] = LockedTransform(sites=number)
        for pattern in sorted({*record.patterns, *(each.transform for each in record.near_misses)}):
            misses = [each for each in record.near_misses if each.transform == pattern]
            sites = record.patterns.get(pattern, 0)
            rows[f"{key}: {pattern}"] = LockedTransform(sites=sites, misses=_reasons(misses))
    return LockedModel(model=name, nodes=0, program="", configuration="", transforms=rows)


def compare_passes(old: LockedModel, passes: Mapping[str, PassRecord]) -> Iterator[LockDifference]:
    """Compare watched passes with an entry of a lock file. Records of another torch than this one are a difference."""
    installed = machine.package_version("torch")
    for torch in sorted({record.torch for record in passes.values()} - {installed}):
        text = f"The records are of torch {torch}, and {installed} is installed: watch the program again."
        yield LockDifference(old.model, text)
    if dropped := sum(record.dropped for record in passes.values()):
        yield LockDifference(old.model, f"{dropped} calls of passes were not recorded: the counts are incomplete.")
    for name, record in passes.items():
        if record.error:
            text = f"The near misses of {name} are incomplete: {record.error}."
            yield LockDifference(old.model, text, fails=False, transform=name)
    yield from compare(old, lock_passes(old.model, passes), lambda key: explain_miss(passes, key))


def explain_miss(passes: Mapping[str, PassRecord], key: str) -> str:
    """Return the nearest miss of a pass, or of a pattern (`pass: pattern`); or the calls that a function left."""
    name, _, part = (key, "", "") if key in passes else key.rpartition(": ")
    record = passes.get(name)
    if record is not None and part.startswith(_REMOVED):
        return "; ".join(left_calls(record, part.removeprefix(_REMOVED))) or "the graph has no such call"
    findings = record.near_misses if record is not None else ()
    return next((each.text for each in findings if part in ("", each.transform)), "")


def left_calls(record: PassRecord, operator: str = "") -> list[str]:
    """Return the calls left of an operator, or of all that a function removed; also of the same or another wrapper."""
    removed = [operator] if operator else [each.removeprefix(_REMOVED) for each in record.changes if _REMOVED in each]
    kinds = {part for each in removed for part in each.partition("(")[::2]} - {""}
    found = [name for name in record.left if not kinds.isdisjoint(name.partition("(")[::2])]
    more = {name: record.num_left.get(name, 0) - len(record.left[name]) for name in found}
    lines = [(f"left: {call}" for call in record.left[name]) for name in found]
    lines += [(f"left: {number} more calls of {name}" for name, number in more.items() if number > 0)]
    return [line for each in lines for line in each]


def _reasons(findings: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for each in findings:
        counts[each.kind.value] += len(each.roots)
    return dict(sorted(counts.items()))
