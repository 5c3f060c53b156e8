"""The copy proof of a package: state is written where it lies, and nothing of its size is moved.

Static: every generated kernel or call that touches a state is listed with the bytes it reads and writes, as the
compiler's own scheduler states them, and held against the generated source; what is not understood fails the proof.
Measured: one step runs on state whose pages are watched, and everything that torch allocates is counted.
"""

from __future__ import annotations

import ast
import json
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from inlay.compile import source
from inlay.program.bindings import Role
from inlay.state.watch import allocations, arena, pages_written

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.compile.load import LoadedPackage
    from inlay.compile.manifest import Bucket, PieceFile

PAGE = 4096


@dataclass
class StateProof:
    """What is known of one state."""

    name: str
    kind: str
    bytes: int
    bytes_written: int = 0
    """In a step of one token a sequence: what kernels write, from their own index ranges."""
    bytes_copied: int = 0
    pages_written: int = 0
    """Measured, in the same step."""
    touched_by: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Proof:
    """The states of a package, and what speaks against it."""

    bindings: list[StateProof]
    problems: list[str] = field(default_factory=list)
    steps: int = 0

    @property
    def holds(self) -> bool:
        """Whether nothing is copied and everything is understood."""
        return not self.problems and not any(state.bytes_copied for state in self.bindings)

    def to_json(self) -> dict[str, Any]:
        """The proof for machines."""
        return {"holds": self.holds, "problems": self.problems, "bindings": [vars(state) for state in self.bindings]}


def prove(package: LoadedPackage) -> Proof:
    """Prove a package, statically and by measuring."""
    manifest = package.manifest
    states = {
        row.name: StateProof(row.name, manifest.bindings.alias(row.name).why, row.nbytes) for row in manifest.states
    }
    proof = Proof(list(states.values()))
    for bucket in manifest.buckets:
        _prove_bucket(bucket, package.folder, states, proof)
    if states and not proof.problems:
        _measure(package, states, proof)
    return proof


def _prove_bucket(bucket: Bucket, folder: Path, states: dict[str, StateProof], proof: Proof) -> None:
    pieces = {piece.name: piece for piece in bucket.pieces}
    for piece in bucket.pieces:
        proof.problems += [f"{bucket.name}: {piece.name}: {text}" for text in _read_source(piece, folder)]
    sizes = {name: low for name, (low, _) in bucket.sizes.items()}
    written = dict.fromkeys(states, False)
    totals = dict.fromkeys(states, 0)
    for number, step in enumerate(bucket.steps):
        piece, where = pieces[step.piece], f"{bucket.name}: step {number} ({step.piece})"
        for name, value in zip(piece.ins, step.ins, strict=True):
            if name in piece.written and value not in states:
                proof.problems.append(f"{where} writes to {value}, which is no state: a cache is staged there")
            if value in states and name not in piece.states:
                proof.problems.append(f"{where} takes the state {value} in code that nobody looked at")
        for access in piece.accesses:
            state = states.get(step.ins[piece.ins.index(access["state"])])
            if state is None:
                continue
            totals[state.name] += _account(access, state, sizes, where, proof)
            written[state.name] |= bool(access.get("writes"))
        proof.problems += [f"{where} hands {name} on as a new value" for name in step.outs if name in states]
    for name in states:
        states[name].bytes_written = max(states[name].bytes_written, totals[name])
    proof.problems += [f"{bucket.name}: nothing writes to {name}" for name, done in written.items() if not done]


def _account(access: dict[str, str], state: StateProof, sizes: dict[str, int], where: str, proof: Proof) -> int:
    """Note one access; how many bytes it writes at these sizes."""
    if access.get("unknown"):
        proof.problems.append(f"{where}: {access['by']} touches {state.name}: {access['unknown']}")
        return 0
    noted: dict[str, Any] = {key: access[key] for key in ("by", "reads", "writes", "copies") if key in access}
    state.touched_by.append({"where": where, **noted})
    copied = _evaluate(access.get("copies", "0"), sizes)
    state.bytes_copied = max(state.bytes_copied, copied)
    return _evaluate(access.get("writes", "0"), sizes)


def _read_source(piece: PieceFile, folder: Path) -> list[str]:
    """What the generated source does to state that the list of accesses does not say."""
    if not piece.states:
        return []
    file = folder / piece.file
    calls = json.loads(file.with_suffix(".json").read_text())["nodes"]
    listed = {
        state: (
            any(each.get("reads") for each in piece.accesses if each["state"] == state),
            any(each.get("writes") for each in piece.accesses if each["state"] == state),
        )
        for state in piece.states
    }
    found = []
    for each in source.mentions(file.with_suffix(".cpp").read_text(), calls):
        state = piece.ins[each.input] if 0 <= each.input < len(piece.ins) else ""
        if each.input >= 0 and state not in piece.states:
            continue
        reads, writes = listed.get(state, (False, False))
        if not each.understood:
            found.append(f"a line of its source is not understood: {each.by}")
        elif each.reads and not reads:
            found.append(f"{each.by} reads {state}, which is not listed")
        elif each.writes and not writes:
            found.append(f"{each.by} writes to {state}, which is not listed")
    return found


def _measure(package: LoadedPackage, states: dict[str, StateProof], proof: Proof) -> None:
    """Run one step of the smallest sizes on watched state."""
    rows = {row.name: row for row in package.manifest.states}
    shapes = {name: (tuple(int(size) for size in row.shape), getattr(torch, row.dtype)) for name, row in rows.items()}
    whole, given = arena(shapes)
    for name, value in package.initial.items():
        given[name].copy_(value)
    inputs = _smallest_inputs(package)

    def step() -> dict[str, Any]:
        return package({**given, **inputs})

    results = [value.numel() * value.element_size() for value in step().values()]
    before = {name: value.data_ptr() for name, value in given.items()}
    marks = pages_written(step, whole)
    at = 0
    for name, value in given.items():
        count = -(-value.numel() * value.element_size() // PAGE)
        states[name].pages_written = sum(marks[at : at + count])
        at += count
    blocks = sorted(allocations(step))
    for size in results:
        if size in blocks:
            blocks.remove(size)
    for state in sorted(states.values(), key=lambda each: -each.bytes):
        if blocks and blocks[-1] >= state.bytes:
            state.bytes_copied = max(state.bytes_copied, blocks.pop())
    moved = [name for name, value in given.items() if value.data_ptr() != before[name]]
    proof.problems += [f"{name} does not stay where it is" for name in moved]
    proof.steps = 3


def _smallest_inputs(package: LoadedPackage) -> dict[str, torch.Tensor]:
    bucket = package.manifest.buckets[0]
    states = {row.name for row in package.manifest.states}
    made = {}
    for row in package.manifest.bindings.of(Role.INPUT):
        if row.name not in states:
            shape = [size if isinstance(size, int) else bucket.sizes.get(size, (1, 1))[0] for size in row.shape]
            made[row.name] = torch.zeros(shape, dtype=getattr(torch, row.dtype))
    return made


_ARITHMETIC: dict[type[Any], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def _evaluate(text: str, sizes: dict[str, int]) -> int:
    """A number of bytes at these sizes.

    >>> _evaluate("128*batch*length + 2", {"batch": 2, "length": 1})
    258
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return sizes.get(name, 1)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                result: int = _ARITHMETIC[type(op)](value(left), value(right))
                return result
        raise ValueError(text)

    return value(ast.parse(text or "0", mode="eval").body)
