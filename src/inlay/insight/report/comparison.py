"""Compare two packages or two locks table by table, or two programs side by side; and watched passes with a lock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.insight.report.line_table import LineTable
from inlay.insight.report.package_report import report_package
from inlay.insight.report.recorder import compare_programs
from inlay.insight.watch.folder import lock_passes, read_passes
from inlay.package.loader import read_manifest
from inlay.package.store import is_package
from inlay.transforms.lock import read_lock, versions

if TYPE_CHECKING:
    from inlay.program.program import Program
    from inlay.transforms.lock import LockedModel

Tables = dict[str, dict[str, str]]
"""Title of a table → name of a row → text."""


@dataclass(frozen=True)
class ComparisonRow:
    """One compared property; a side without this property is empty."""

    table: str
    name: str
    left: str
    right: str

    @property
    def is_different(self) -> bool:
        """Whether the two sides differ."""
        return self.left != self.right


def detect_kind(text: str) -> str:
    """Return `package`, `lock` or `program`; only inputs of the same kind can be compared."""
    path = Path(text)
    if is_package(path):
        return "package"
    return "lock" if path.is_file() and path.suffix in (".lock", ".yaml", ".yml") else "program"


def require_same_kind(left: str, right: str) -> str:
    """Return the kind of both inputs; raise if they differ."""
    kinds = [detect_kind(each) for each in (left, right)]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{left} is a {kinds[0]} and {right} is a {kinds[1]}.", "Compare two packages, two locks or two programs."
        )
    return kinds[0]


def compare_tables(left: str, right: str) -> list[ComparisonRow]:
    """Compare two packages or two locks row by row."""
    read = _package_tables if require_same_kind(left, right) == "package" else _lock_tables
    tables = [read(Path(each)) for each in (left, right)]
    found: list[ComparisonRow] = []
    for title in dict.fromkeys([*tables[0], *tables[1]]):
        ours, theirs = (each.get(title, {}) for each in tables)
        names = dict.fromkeys([*ours, *theirs])
        found += [ComparisonRow(title, name, ours.get(name, ""), theirs.get(name, "")) for name in names]
    return found


def build_table_page(left: str, right: str, rows: list[ComparisonRow]) -> dict[str, Any]:
    """Return the page data of two packages or locks."""
    titles = list(dict.fromkeys(row.table for row in rows))
    tables = [
        {"title": title, "rows": [[row.name, row.left, row.right] for row in rows if row.table == title]}
        for title in titles
    ]
    return _page(left, right, tables=tables, equal=not any(row.is_different for row in rows))


def build_program_page(left: Program, right: Program, names: tuple[str, str]) -> dict[str, Any]:
    """Return the page data of two programs."""
    lines = LineTable()
    found = compare_programs(left, right, lines)
    return _page(*names, diff=found, equal=found["equal"], lines=lines.texts)


def build_watched_page(folder: str, lock: Path | None) -> dict[str, Any]:
    """Return the page data of a folder of `inlay watch`; with a lock file also what differs from it."""
    passes = read_passes(folder)
    tables = []
    entries = read_lock(lock).models if lock is not None else []
    own = [entry for entry in entries if Path(entry.model) == Path(folder)]
    for entry in own or entries:
        before, after = _transform_rows(entry), _transform_rows(lock_passes(folder, passes))
        rows = [[name, before.get(name, ""), after.get(name, "")] for name in dict.fromkeys((*before, *after))]
        rows = [row for row in rows if row[1] != row[2]]
        tables.append({"title": "Changes since the lock", "columns": [str(lock), "now"], "rows": rows})
    records = [each.to_json() for each in passes.values()]
    return {**_page(folder, folder, tables=tables), "kind": "watched", "title": _short_name(folder), "passes": records}


def _page(left: str, right: str, **more: Any) -> dict[str, Any]:
    page = {"kind": "diff", "title": f"{_short_name(left)} and {_short_name(right)}", "sides": [left, right]}
    return {**page, "versions": versions(), "tables": [], "diff": None, "lines": [], **more}


def _short_name(text: str) -> str:
    return Path(text).name or text


def _lock_tables(path: Path) -> Tables:
    lock = read_lock(path)
    tables: Tables = {"Versions": dict(lock.versions)}
    for model in lock.models:
        about = {"architecture": model.architecture, "nodes": f"{model.nodes:,}", "program": model.program}
        tables[model.model] = about | {"configuration": model.configuration}
        tables[model.model] |= _transform_rows(model)
    return tables


def _transform_rows(model: LockedModel) -> dict[str, str]:
    rows = {}
    for key, each in model.transforms.items():
        reasons = ", ".join(f"{reason} × {count}" for reason, count in each.misses.items())
        rows[key] = f"{each.sites} sites" + (f"; missed: {reasons}" if reasons else "")
    return rows


def _package_tables(path: Path) -> Tables:
    report, manifest = report_package(path), read_manifest(path)[0]
    memory = report["memory"]
    tables: Tables = {
        "Package": {
            "model": manifest.model,
            "architecture": manifest.architecture,
            "kind": manifest.kind,
            "built for": report["target"],
            "weights": f"{len(manifest.weights)} tensors, {manifest.weights_file.size:,} bytes",
            "state per session": f"{memory['state']:,} bytes",
            "code": f"{memory['code']:,} bytes",
        },
        "Versions": dict(report["versions"]),
        "Facts": {name: f"{value:,}" for name, value, _ in report["facts"]},
        "Transforms": {each["key"]: _transform_text(each) for each in report["transforms"]},
        "Configuration": {f"{key}.{name}": value for key, name, value, _ in report["configuration"]["rows"]},
        "Bindings": {f"{row['kind']} {row['name']}": _binding_text(row) for row in report["bindings"]},
        "Pieces": {},
        "Kernels": {},
    }
    for bucket in report["plan"]["buckets"]:
        for piece in bucket["pieces"]:
            label = f"{bucket['name']}, {piece['name']}"
            tables["Pieces"][label] = f"{piece['what']} × {piece['steps']}, {piece['size']:,} bytes"
            for kernel in piece["kernels"]:
                ways = ", ".join(f"{each['rows']}: {each['way']}" for each in kernel["timings"])
                tables["Kernels"][f"{label}, {kernel['layer']}, {kernel['bits']} bits"] = ways
    return tables


def _transform_text(each: dict[str, Any]) -> str:
    reasons = ", ".join(f"{miss['kind']} × {miss['count']}" for miss in each["misses"])
    return f"{each['sites']} sites" + (f"; missed: {reasons}" if reasons else "")


def _binding_text(row: dict[str, Any]) -> str:
    times = f" × {row['count']}" if row["count"] > 1 else ""
    return f"{row['type']}{times}" + (f", aliased ({row['why']})" if row["why"] else "")
