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
from inlay.insight.watch.records import PassRecord
from inlay.rewrite.reasons import Reason
from inlay.transforms.lock import LockedModel, LockedTransform, compare
from inlay.watch_startup import SUFFIX, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from inlay.transforms.lock import LockDifference

_lock = threading.Lock()
_is_recording = False


def start_recording() -> None:
    """Write the record of every pass of this process to the folder that the environment variable names."""
    global _is_recording
    with _lock:
        if not _is_recording:
            _is_recording = True
            add_listener(_write)


def _write(record: PassRecord) -> None:
    folder = Path(os.environ.get(VARIABLE, "."))
    try:
        with _lock:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{os.getpid()}{SUFFIX}").open("a") as out:
                out.write(json.dumps(record.to_json()) + "\n")
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
        raise UsageError(f"{folder} has no records.", "No pattern pass ran: is everything from Inductor's cache?")
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
        *(tuple(data["places"]), tuple(findings), data["error"]),
    )


def sum_records(records: list[PassRecord]) -> dict[str, PassRecord]:
    """Return one record for each pass, over all graphs; findings of the same text are one."""
    merged: dict[str, PassRecord] = {}
    for name in dict.fromkeys(record.name for record in records):
        own = [record for record in records if record.name == name]
        findings = {(each.transform, each.text): each for record in own for each in record.findings}
        patterns: Counter[str] = Counter()
        for record in own:
            patterns.update(record.patterns)
        merged[name] = PassRecord(
            *(name, "", max(record.num_patterns for record in own), sum(record.matches for record in own)),
            *(dict(patterns), tuple(place for record in own for place in record.places)),
            tuple(sorted(findings.values(), key=lambda each: (each.is_trivial, each.of - each.matched))),
            next((record.error for record in own if record.error), ""),
        )
    return merged


def lock_passes(name: str, passes: Mapping[str, PassRecord]) -> LockedModel:
    """Return the matches of watched passes as an entry of a lock file."""
    rows = {}
    for key, record in passes.items():
        rows[key] = LockedTransform(sites=record.matches, misses=_reasons(record.near_misses))
        for pattern in sorted({*record.patterns, *(each.transform for each in record.near_misses)}):
            misses = [each for each in record.near_misses if each.transform == pattern]
            sites = record.patterns.get(pattern, 0)
            rows[f"{key}: {pattern}"] = LockedTransform(sites=sites, misses=_reasons(misses))
    return LockedModel(model=name, nodes=0, program="", configuration="", transforms=rows)


def compare_passes(old: LockedModel, passes: Mapping[str, PassRecord]) -> Iterator[LockDifference]:
    """Compare watched passes with an entry of a lock file."""
    return compare(old, lock_passes(old.model, passes), lambda key: explain_miss(passes, key))


def explain_miss(passes: Mapping[str, PassRecord], key: str) -> str:
    """Return the nearest miss of a pass, or of one of its patterns (`pass: pattern`)."""
    name, _, pattern = key.partition(": ")
    findings = passes[name].near_misses if name in passes else ()
    return next((each.text for each in findings if pattern in ("", each.transform)), "")


def _reasons(findings: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for each in findings:
        counts[each.kind.value] += len(each.roots)
    return dict(sorted(counts.items()))
