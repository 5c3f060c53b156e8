"""The report of a package, from the files in its folder. Nothing is loaded, run or captured."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import yaml

from inlay.errors import PackageError, UsageError
from inlay.insight.report.tables import bindings_table, run_lengths, weights_by_type
from inlay.package.loader import read_manifest
from inlay.program.bindings import Binding, Role
from inlay.transforms.base import find_transform
from inlay.transforms.lock import read_lock

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from inlay.lowering.buckets import Bucket, PieceFile
    from inlay.package.manifest import Manifest
    from inlay.transforms.lock import LockedTransform

_NAMES = 400


def report_package(path: Path) -> dict[str, Any]:
    """Return the page data of a package."""
    manifest, folder = read_manifest(path)
    locked = read_lock(folder / "matches.lock") if "matches.lock" in manifest.files else None
    model = locked.models[0] if locked is not None and len(locked.models) == 1 else None
    remarks = _remarks(folder)
    target = manifest.target
    return {
        "kind": "package",
        "title": manifest.model,
        "architecture": manifest.architecture,
        "versions": {"inlay": manifest.inlay, "torch": target.torch, **(locked.versions if locked else {})},
        "target": f"{target.machine} with {', '.join(target.cpu_features)}; {target.threads} threads",
        "facts": [[name, value, "manifest"] for name, value in manifest.facts.items()],
        "nodes": [model.nodes, None] if model is not None else [None, None],
        "seconds": {},
        "transforms": [
            _transform(key, each, remarks) for key, each in (model.transforms if model is not None else {}).items()
        ],
        "programs": [],
        "candidates": {"rows": [], "why": "A package contains no program to search. Use `inlay report MODEL`."},
        "bindings": bindings_table(manifest.bindings, {}),
        "plan": {"buckets": [_bucket(manifest, each) for each in manifest.buckets], "why": ""},
        "memory": _memory(manifest),
        "drift": {"rows": [], "why": "Not measured: a report does not run a package. Use `inlay verify MODEL`."},
        "configuration": _settings(folder),
        "lines": [],
    }


def _remarks(folder: Path) -> list[dict[str, Any]]:
    file = folder / "remarks.jsonl"
    try:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    except (ValueError, OSError) as error:
        raise PackageError(f"{file.name} of the package cannot be read.", "Copy or build the package again.") from error


def _transform(key: str, locked: LockedTransform, remarks: list[dict[str, Any]]) -> dict[str, Any]:
    name = key.partition("#")[0]
    mine = [each for each in remarks if each["transform"] == name]
    summary, numerics, stage = _describe(name)
    return {
        "key": key,
        "stage": stage,
        "status": "ran",
        "skip_reason": "",
        "summary": summary,
        "numerics": numerics,
        "sites": locked.sites,
        "nodes": [None, None],
        "seconds": None,
        "contract": None,
        "places": [],
        "misses": _group_misses(each for each in mine if each["kind"] != "analysis"),
        "notes": [each["reason"] for each in mine if each["kind"] == "analysis"],
        "diff": None,
    }


def _describe(name: str) -> tuple[str, str, str]:
    """Return summary, numerics and stage of a transform, if it is installed."""
    try:
        cls = find_transform(name)
    except UsageError:
        return "This transform is not installed.", "unknown", ""
    return cls.summary(), cls.numerics.value, cls.stage.value


def _group_misses(remarks: Any) -> list[dict[str, Any]]:
    """Group remarks with the same reason at the same source line."""
    groups: dict[tuple[str, str, int, int], list[dict[str, Any]]] = {}
    for each in remarks:
        kind = each["reason"].partition(":")[0]
        groups.setdefault((kind, each["source"], each["matched_nodes"], each["pattern_nodes"]), []).append(each)
    return [
        {
            "kind": kind,
            "reason": group[0]["reason"],
            "source": source,
            "matched": matched,
            "of": of,
            "suggestion": group[0]["suggestion"],
            "trivial": False,
            "count": len(group),
            "layers": "",
            "names": [each["nodes"][0] for each in group[:_NAMES] if each["nodes"]],
        }
        for (kind, source, matched, of), group in groups.items()
    ]


def _bucket(manifest: Manifest, bucket: Bucket) -> dict[str, Any]:
    steps = Counter(step.piece for step in bucket.steps)
    held = {step.piece: sum(_weight_bytes(manifest, each) for each in step.constants) for step in bucket.steps}
    return {
        "name": bucket.name,
        "sizes": bucket.text,
        "order": run_lengths(bucket.steps),
        "pieces": [
            {
                "name": piece.name,
                "steps": steps[piece.name],
                "what": "compiled" if piece.file.endswith(".so") else "call by call",
                "calls": piece.fallback_calls,
                "weights": held.get(piece.name, 0),
                "states": len(piece.states),
                "operators": {},
                "size": manifest.files[piece.file].size,
                "kernels": kernel_table(piece),
            }
            for piece in bucket.pieces
        ],
    }


def kernel_table(piece: PieceFile) -> list[dict[str, Any]]:
    """Return the linear layers of a piece with several kernels: the chosen kernel per row count, and all timings."""
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in filter(lambda row: row.timings, piece.kernels):
        timings = [
            {"rows": rows, "way": row.variant(rows), "microseconds": row.timings[str(rows)]}
            for rows in sorted(map(int, row.timings))
        ]
        label = row.features, row.depth, row.bits
        found.setdefault(label, {"layer": f"{row.features} × {row.depth}", "bits": row.bits, "timings": timings})
    return list(found.values())


def _weight_bytes(manifest: Manifest, name: str) -> int:
    row = manifest.weights.get(name)
    return Binding(name, Role.PARAMETER, name, row.dtype, row.shape).nbytes if row is not None else 0


def _memory(manifest: Manifest) -> dict[str, Any]:
    return {
        "weights": weights_by_type(
            (row.dtype, _weight_bytes(manifest, name)) for name, row in manifest.weights.items()
        ),
        "state": sum(row.nbytes for row in manifest.states),
        "code": sum(row.size for name, row in manifest.files.items() if name.endswith(".so")),
        "activations": [],
        "why": "A package does not store the shapes of values inside pieces. Use `inlay report MODEL`.",
    }


def _settings(folder: Path) -> dict[str, Any]:
    why = "A package stores the values, not their origin. Use `inlay config MODEL` to see the origin."
    file = folder / "resolved.yaml"
    if not file.exists():
        return {"rows": [], "why": "The package has no resolved.yaml."}
    try:
        settings: Mapping[str, Mapping[str, Any]] = yaml.safe_load(file.read_text())["transforms"]
        rows = [[key, name, repr(value), ""] for key, each in settings.items() for name, value in each.items()]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, OSError) as error:
        raise PackageError(
            "resolved.yaml of the package cannot be read.", "Copy or build the package again."
        ) from error
    return {"rows": rows, "why": why}
