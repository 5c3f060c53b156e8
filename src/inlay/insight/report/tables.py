"""Tables of a report: bindings and their storage, memory, plans, settings."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from inlay.insight.candidates.region import PREFILL_ROWS, ConcreteSizes
from inlay.lowering.buckets import format_sizes
from inlay.program.bindings import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inlay.config import ResolvedConfig
    from inlay.lowering.lower import LoweredProgram
    from inlay.lowering.plan import Piece
    from inlay.program.bindings import Binding, Bindings
    from inlay.program.program import Program
    from inlay.transforms.pass_manager import TransformStep

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def bindings_table(bindings: Bindings, origins: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return all bindings; equal bindings of several layers share a row, and a state shares a row with its output."""
    written = {row.alias.binding: row for row in bindings.outs if row.alias is not None}
    groups: dict[Any, list[Binding]] = {}
    for row in bindings:
        if row.alias is None:
            out = written.get(row.name)
            why = out.alias.kind if out is not None and out.alias is not None else ""
            key = (_kind(row, out is not None), _NUMBER.sub(".*", row.target), row.type_text, why)
            groups.setdefault(key, []).append(row)
    found = []
    for (kind, name, text, why), rows in groups.items():
        sources = {_origin(origins[row.name]) for row in rows if row.name in origins}
        found.append(
            {
                "kind": kind,
                "name": name if len(rows) > 1 else rows[0].target,
                "count": len(rows),
                "type": text,
                "bytes": sum(row.nbytes for row in rows) if kind in ("state", "weight") else None,
                "why": why,
                "from": ", ".join(sorted(sources)),
                "members": [
                    [row.target, written[row.name].name] if row.name in written else [row.target] for row in rows
                ],
            }
        )
    return found


def _kind(row: Binding, written: bool) -> str:
    if written:
        return "state"
    return row.role.value if row.role in (Role.INPUT, Role.OUTPUT) else "weight"


def _origin(text: str) -> str:
    """Return the origin of a tensor without folders and with layer numbers replaced by `*`.

    >>> _origin("/models/tiny.gguf#blk.0.attn_q.weight"), _origin("layers.3.q, layers.3.k via concat")
    ('tiny.gguf', 'layers.*.q, layers.*.k via concat')
    """
    file = re.split(r"[\\/]", text.partition("#")[0])[-1]
    return re.sub(r"\.\d+(?=\.)", ".*", file)


def weights_by_type(rows: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the number and bytes of weights by dtype.

    >>> weights_by_type([("uint8", 100), ("float32", 8), ("uint8", 1)])
    [{'dtype': 'uint8', 'count': 2, 'bytes': 101}, {'dtype': 'float32', 'count': 1, 'bytes': 8}]
    """
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for dtype, size in rows:
        count[dtype] += 1
        total[dtype] += size
    return [{"dtype": dtype, "count": count[dtype], "bytes": size} for dtype, size in total.most_common()]


def memory_table(program: Program, lowered: LoweredProgram | None) -> dict[str, Any]:
    """Return the bytes of weights, of the state per session, and of the largest value of each piece."""
    states = {row.name for row in program.bindings.state}
    weights = [row for row in program.bindings.ins if row.role is not Role.INPUT and row.name not in states]
    activations = [
        {"bucket": name, "piece": piece.name, "rows": rows, **largest}
        for name, sizes, plan in (lowered.buckets if lowered is not None else ())
        for piece in plan.pieces
        for rows in [_rows(sizes)]
        if (largest := _largest(piece, rows))
    ]
    return {
        "weights": weights_by_type((row.dtype, row.nbytes) for row in weights if row.is_tensor),
        "state": sum(row.nbytes for row in program.bindings.state),
        "activations": activations,
        "why": "" if lowered is not None else "The program could not be lowered to pieces.",
    }


def _rows(sizes: Mapping[str, tuple[int, int | None]]) -> int:
    """Return the number of rows to compute sizes for: a typical prompt, limited by the bucket."""
    highs = [high for name, (_, high) in sizes.items() if name != "batch"]
    return min([PREFILL_ROWS, *(high for high in highs if high is not None)])


def _largest(piece: Piece, rows: int) -> dict[str, Any]:
    sizes, types = ConcreteSizes(piece.program, rows), piece.program.types
    states = {row.name for row in piece.program.bindings.state}
    output: Any = piece.program.graph.output_node().args[0]
    new_states = {
        value
        for row, value in zip(piece.program.bindings.outs, output, strict=True)
        if row.alias is not None and row.alias.binding in states
    }
    made = [
        (sizes.bytes(value), node)
        for node in piece.program.graph.nodes
        if node.op == "call_function"
        and node not in new_states
        and isinstance(value := node.meta.get("val"), torch.Tensor)
    ]
    if not made:
        return {}
    size, node = max(made, key=lambda each: each[0])
    return {"bytes": size, "value": node.name, "type": types.text(node.meta["val"])}


def plan_table(lowered: LoweredProgram) -> list[dict[str, Any]]:
    """Return the pieces of every bucket, in execution order, with their contents."""
    weights = {row.name: row.nbytes for row in lowered.program.bindings.ins}
    found = []
    for name, sizes, plan in lowered.buckets:
        steps = Counter(step.piece for step in plan.steps)
        held = {step.piece: sum(weights.get(each, 0) for each in step.constants) for step in plan.steps}
        pieces = [
            {
                "name": piece.name,
                "steps": steps[piece.name],
                "what": "call by call" if piece.is_eager else "compiled",
                "calls": sum(node.op == "call_function" for node in piece.program.graph.nodes),
                "weights": held[piece.name],
                "states": len(piece.states),
                "operators": dict(piece.program.op_counts().most_common(12)),
                "size": None,
                "kernels": [],
            }
            for piece in plan.pieces
        ]
        found.append({"name": name, "sizes": format_sizes(sizes), "order": run_lengths(plan.steps), "pieces": pieces})
    return found


def run_lengths(steps: Sequence[Any]) -> list[list[Any]]:
    """Return each piece and how often it runs consecutively."""
    found: list[list[Any]] = []
    for step in steps:
        if found and found[-1][0] == step.piece:
            found[-1][1] += 1
        else:
            found.append([step.piece, 1])
    return found


def settings_table(resolved: ResolvedConfig, steps: Sequence[TransformStep]) -> list[tuple[str, str, Any, str]]:
    """Return rows of transform, option, value and configuration layer."""
    origins = {entry.key: entry.options for entry in resolved.entries}
    return [
        (step.key, name, value, origins[step.key][name].origin if name in origins[step.key] else "built in")
        for step in steps
        for name, value in step.transform.options.model_dump().items()
    ]
