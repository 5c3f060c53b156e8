"""A folder with the records of watched processes: one file for each process, one line for each call of a pass."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.insight.findings import Finding
from inlay.insight.watch.observer import add_listener
from inlay.insight.watch.records import MAX_RECORDS, PassRecord
from inlay.rewrite.reasons import Reason
from inlay.transforms.lock import LockedModel, LockedTransform, compare
from inlay.watch_startup import SUFFIX, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from inlay.transforms.lock import LockDifference

_REMOVED = "removed "
_lock = threading.Lock()
_is_recording = False
_counts: Counter[int] = Counter()
"""Number of records of this process, and of those that it was forked from."""


def start_recording() -> None:
    """Write the record of every pass of this process to the folder that the environment variable names."""
    global _is_recording
    with _lock:
        if not _is_recording:
            _is_recording = True
            add_listener(_write)


def _write(record: PassRecord) -> None:
    folder, process = Path(os.environ.get(VARIABLE, ".")), os.getpid()
    try:
        with _lock:
            folder.mkdir(parents=True, exist_ok=True)
            _counts[process] += 1
            dropped = max(_counts[process] - MAX_RECORDS, 0)
            kept = PassRecord(record.name, "", 0, 0, dropped=dropped) if dropped else record
            with (folder / f"{process}{'-dropped' * bool(dropped)}{SUFFIX}").open("w" if dropped else "a") as out:
                out.write(json.dumps(kept.to_json()) + "\n")
    except OSError as error:
        print(f"inlay: the record of {record.name} was not written: {error}", file=sys.stderr)


def is_watch_folder(path: str | Path) -> bool:
    """Return whether a folder has records of watched processes."""
    try:
        return any(Path(path).glob(f"*{SUFFIX}"))
    except (OSError, ValueError):
        return False


def read_records(folder: str | Path) -> list[PassRecord]:
    """Return the records of a folder, process by process."""
    found = []
    for file in sorted(Path(folder).glob(f"*{SUFFIX}"), key=lambda each: (each.stat().st_mtime, each.name)):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                found.append(_record(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{file}:{number} is not a record.", "Watch the program again.") from error
    if not found:
        raise UsageError(f"{folder} has no records.", "No graph pass ran: is everything from Inductor's cache?")
    return found


def _record(data: dict[str, Any]) -> PassRecord:
    findings = []
    for each in data["findings"]:
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in each.items()
        }
        given["kind"] = Reason(given["kind"])
        findings.append(Finding(**{field.name: given[field.name] for field in fields(Finding)}))
    return PassRecord(
        *(data["pass"], data["compile_id"], data["num_patterns"], data["matches"], data["patterns"]),
        *(tuple(data["places"]), tuple(findings), data["error"], data["changes"]),
        *({name: tuple(calls) for name, calls in data["left"].items()}, data["dropped"]),
    )


def sum_records(records: list[PassRecord]) -> dict[str, PassRecord]:
    """Return one record for each pass, over all graphs; findings of the same text are one."""
    merged: dict[str, PassRecord] = {}
    for name in dict.fromkeys(record.name for record in records):
        own = [record for record in records if record.name == name]
        findings = {(each.transform, each.text): each for record in own for each in record.findings}
        patterns, changes = Counter[str](), Counter[str]()
        left: dict[str, tuple[str, ...]] = {}
        for record in own:
            patterns.update(record.patterns)
            changes.update(record.changes)
            left |= {key: tuple(dict.fromkeys((*left.get(key, ()), *calls))) for key, calls in record.left.items()}
        merged[name] = PassRecord(
            *(name, "", max(record.num_patterns for record in own), sum(record.matches for record in own)),
            *(dict(patterns), tuple(place for record in own for place in record.places)),
            tuple(sorted(findings.values(), key=lambda each: (each.is_trivial, each.of - each.matched))),
            next((record.error for record in own if record.error), ""),
            dict(changes),
            left,
            sum(record.dropped for record in own),
        )
    return merged


def lock_passes(name: str, passes: Mapping[str, PassRecord]) -> LockedModel:
    """Return the matches of watched passes as an entry of a lock file."""
    rows = {}
    for key, record in passes.items():
        sites = record.matches or sum(record.changes.values())
        rows[key] = LockedTransform(sites=sites, misses=_reasons(record.near_misses))
        for change, number in sorted(record.changes.items()):
            if not record.num_patterns and change.startswith(_REMOVED):
                rows[f"{key}: {change}"] = LockedTransform(sites=number)
        for pattern in sorted({*record.patterns, *(each.transform for each in record.near_misses)}):
            misses = [each for each in record.near_misses if each.transform == pattern]
            sites = record.patterns.get(pattern, 0)
            rows[f"{key}: {pattern}"] = LockedTransform(sites=sites, misses=_reasons(misses))
    return LockedModel(model=name, nodes=0, program="", configuration="", transforms=rows)


def compare_passes(old: LockedModel, passes: Mapping[str, PassRecord]) -> Iterator[LockDifference]:
    """Compare watched passes with an entry of a lock file."""
    return compare(old, lock_passes(old.model, passes), lambda key: explain_miss(passes, key))


def explain_miss(passes: Mapping[str, PassRecord], key: str) -> str:
    """Return the nearest miss of a pass, or of a pattern (`pass: pattern`); or the calls that a function left."""
    name, _, part = key.partition(": ")
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
    return [f"left: {call}" for name in found for call in record.left[name]]


def _reasons(findings: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for each in findings:
        counts[each.kind.value] += len(each.roots)
    return dict(sorted(counts.items()))
