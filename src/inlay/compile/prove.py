"""The copy proof of a package: state is written where it lies, and no step costs more because a cache is longer.

Static: every generated kernel or call that touches a state is listed with the bytes it reads and writes, as the
compiler's own scheduler states them, and held against the generated source; what is not understood fails the proof. Of
a cache, only attention may read more than the rows a step adds.
Measured (`traffic`): every bucket runs on empty, half-full and full caches whose pages are watched, with allocations
counted.
"""

from __future__ import annotations

import ast
import json
import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inlay.compile import source
from inlay.compile.aoti import FILLED
from inlay.compile.traffic import measured
from inlay.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.compile.load import LoadedPackage
    from inlay.compile.manifest import Bucket, PieceFile
    from inlay.compile.traffic import Traffic


@dataclass
class StateProof:
    """What is known of one state."""

    name: str
    kind: str
    bytes: int
    bytes_written: int = 0
    """In a step of one token a sequence: what kernels write, from their own index ranges."""
    bytes_copied: int = 0
    pages_read: int = 0
    """Measured: the most in any step."""
    pages_written: int = 0
    row: int = 0
    """Bytes of one row of one sequence, if this is a cache of rows."""
    touched_by: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Proof:
    """The states of a package, and what speaks against it."""

    bindings: list[StateProof]
    problems: list[str] = field(default_factory=list)
    rooms: tuple[int, ...] = ()
    """Lengths of caches that were measured."""
    steps: int = 0
    """How many steps were measured."""
    allocated: int | None = None
    """The most bytes that a step allocated, in blocks of a kilobyte and more; None: not measured."""

    @property
    def holds(self) -> bool:
        """Whether nothing is copied and everything is understood."""
        return not self.problems and not any(state.bytes_copied for state in self.bindings)

    def to_json(self) -> dict[str, Any]:
        """The proof for machines."""
        measured = {"steps": self.steps, "cache_lengths": self.rooms, "allocated": self.allocated}
        states = [vars(state) for state in self.bindings]
        return {"holds": self.holds, "problems": self.problems, "measured": measured, "bindings": states}


def prove(package: LoadedPackage, longer: LoadedPackage | None = None) -> Proof:
    """Prove a package, statically and by measuring; `longer` is one of the same model with longer caches."""
    manifest = package.manifest
    states = {
        row.name: StateProof(row.name, manifest.bindings.alias(row.name).why, row.nbytes) for row in manifest.states
    }
    if package.cache is not None:
        for row in manifest.states:
            if package.cache.is_cache(row.shape):
                states[row.name].row = row.nbytes // (package.cache.slots * package.cache.room)
    proof = Proof(list(states.values()))
    for bucket in manifest.buckets:
        _prove_bucket(bucket, package.folder, states, proof)
    rooms = [each.cache.room for each in (package, longer) if each is not None and each.cache is not None]
    if longer is not None and rooms != sorted(set(rooms)):
        raise UsageError("The caches of the other package are not longer.", "Build it with a larger --max-length.")
    if states and not proof.problems:
        traffic = measured(package.folder)
        _note(traffic, states, proof)
        if longer is not None:
            other = measured(longer.folder)
            proof.rooms += (other.room,)
            proof.problems += other.problems()
            proof.problems += traffic.problems_beside(other)
    return proof


def _note(traffic: Traffic, states: dict[str, StateProof], proof: Proof) -> None:
    """What was measured."""
    proof.rooms, proof.steps = (traffic.room,), len(traffic.steps)
    proof.problems += traffic.problems()
    if traffic.counts_allocations:
        proof.allocated = max(step.allocated for step in traffic.steps)
    for step in traffic.steps:
        for name, pages in step.pages.items():
            states[name].pages_read = max(states[name].pages_read, pages.read)
            states[name].pages_written = max(states[name].pages_written, pages.written)
        if step.filled is None:  # nothing to compare with: what is as large as a state may be a copy of it
            blocks = sorted((Counter(step.blocks or ()) - Counter(step.results)).elements())
            for state in sorted(states.values(), key=lambda each: -each.bytes):
                if blocks and blocks[-1] >= state.bytes:
                    state.bytes_copied = max(state.bytes_copied, blocks.pop())


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
    reads = access.get("reads", "")
    most = state.row * sizes.get("batch", 1) * sizes.get("length", 1)
    if state.row and reads != FILLED and (count := _evaluate(reads, sizes)) > most:
        done = f"{access['by']} reads {count:,} bytes of {state.name}, and the step adds {most:,}"
        proof.problems.append(f"{where}: {done}: only attention may read what is there")
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
