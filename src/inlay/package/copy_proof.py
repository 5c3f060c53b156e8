"""The copy proof of a package: state is updated in place, and the cost of a step does not depend on the cache length.

Static part: every generated kernel or call that accesses a state is listed with the bytes it reads and writes, as
reported by the compiler's scheduler, and compared with the generated source. Code that cannot be parsed fails the
proof. Only attention may read more of a cache than the rows that a step adds.
Measured part (`memory_traffic`): every bucket runs on empty, half-full and full caches, while page accesses and
allocations are recorded.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.lowering.buckets import READS_FILLED_ROWS
from inlay.package.memory_traffic import measure_in_subprocess
from inlay.program.symbols import evaluate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from inlay.lowering.buckets import Bucket, PieceFile
    from inlay.package.loader import LoadedPackage
    from inlay.package.memory_traffic import Traffic


@dataclass
class StateProof:
    """The evidence for one state."""

    name: str
    kind: str
    bytes: int
    bytes_written: int = 0
    """Bytes that kernels write in a step of one token per sequence, from their index ranges."""
    bytes_copied: int = 0
    pages_read: int = 0
    """Measured: the maximum of all steps."""
    pages_written: int = 0
    row_bytes: int = 0
    """Bytes of one row of one sequence, if this is a KV cache."""
    accesses: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Proof:
    """The states of a package, and the problems found."""

    states: list[StateProof]
    problems: list[str] = field(default_factory=list)
    cache_lengths: tuple[int, ...] = ()
    """Cache lengths that were measured."""
    steps: int = 0
    """Number of steps measured."""
    allocated_bytes: int | None = None
    """Maximum bytes that a step allocated, in blocks of at least a kilobyte; None: not measured."""

    @property
    def holds(self) -> bool:
        """Whether nothing is copied and no problem was found."""
        return not self.problems and not any(state.bytes_copied for state in self.states)

    def to_json(self) -> dict[str, Any]:
        """Return the proof as JSON."""
        measured = {"steps": self.steps, "cache_lengths": self.cache_lengths, "allocated_bytes": self.allocated_bytes}
        states = [vars(state) for state in self.states]
        return {"holds": self.holds, "problems": self.problems, "measured": measured, "states": states}


def prove(package: LoadedPackage, longer: LoadedPackage | None = None) -> Proof:
    """Prove a package, statically and by measurement; `longer` is a package of the same model with longer caches."""
    manifest = package.manifest
    states = {
        row.name: StateProof(row.name, manifest.bindings.find_alias(row.name).kind, row.nbytes)
        for row in manifest.states
    }
    if package.cache is not None:
        for row in manifest.states:
            if package.cache.is_cache(row.shape):
                states[row.name].row_bytes = row.nbytes // (package.cache.slots * int(row.shape[2]))
    proof = Proof(list(states.values()))
    for bucket in manifest.buckets:
        _prove_bucket(bucket, package.folder, states, proof)
    rooms = [each.cache.max_seq_len for each in (package, longer) if each is not None and each.cache is not None]
    if longer is not None and rooms != sorted(set(rooms)):
        raise UsageError("The caches of the --longer package are not longer.", "Build it with a larger --max-length.")
    if states and not proof.problems:
        traffic = measure_in_subprocess(package.folder)
        _note(traffic, states, proof)
        if longer is not None:
            other = measure_in_subprocess(longer.folder)
            proof.cache_lengths += (other.max_seq_len,)
            proof.problems += other.problems()
            proof.problems += traffic.find_growth(other)
    return proof


def _note(traffic: Traffic, states: dict[str, StateProof], proof: Proof) -> None:
    """Add the measurements to the proof."""
    proof.cache_lengths, proof.steps = (traffic.max_seq_len,), len(traffic.steps)
    proof.problems += traffic.problems()
    if traffic.counts_allocations:
        proof.allocated_bytes = max(step.allocated_bytes for step in traffic.steps)
    for step in traffic.steps:
        for name, pages in step.pages.items():
            states[name].pages_read = max(states[name].pages_read, pages.reads)
            states[name].pages_written = max(states[name].pages_written, pages.writes)
        if step.filled_rows is None:  # no KV cache to compare with: a block as large as a state may be a copy of it
            blocks = sorted((Counter(step.allocations or ()) - Counter(step.result_sizes)).elements())
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
            if name in piece.mutated_inputs and value not in states:
                proof.problems.append(f"{where} writes to {value}, which is not a state: a cache is staged there")
            if value in states and name not in piece.states:
                proof.problems.append(f"{where} uses the state {value} in code that was not analyzed")
        for access in piece.accesses:
            state = states.get(step.ins[piece.ins.index(access["state"])])
            if state is None:
                continue
            totals[state.name] += _account(access, state, sizes, where, proof)
            written[state.name] |= bool(access.get("writes"))
        proof.problems += [f"{where} returns {name} as a new value" for name in step.outs if name in states]
    for name in states:
        states[name].bytes_written = max(states[name].bytes_written, totals[name])
    proof.problems += [f"{bucket.name}: nothing writes to {name}" for name, done in written.items() if not done]


def _account(access: dict[str, str], state: StateProof, sizes: dict[str, int], where: str, proof: Proof) -> int:
    """Record one access; return how many bytes it writes at these sizes."""
    if access.get("unknown"):
        proof.problems.append(f"{where}: {access['kernel']} accesses {state.name}: {access['unknown']}")
        return 0
    noted: dict[str, Any] = {key: access[key] for key in ("kernel", "reads", "writes", "copies") if key in access}
    state.accesses.append({"where": where, **noted})
    reads = access.get("reads", "")
    most = state.row_bytes * sizes.get("batch", 1) * sizes.get("length", 1)
    if state.row_bytes and reads != READS_FILLED_ROWS and (count := _evaluate(reads, sizes)) > most:
        done = f"{access['kernel']} reads {count:,} bytes of {state.name}, but the step adds {most:,}"
        proof.problems.append(f"{where}: {done}. Only attention may read existing rows")
    copied = _evaluate(access.get("copies", "0"), sizes)
    state.bytes_copied = max(state.bytes_copied, copied)
    return _evaluate(access.get("writes", "0"), sizes)


def _read_source(piece: PieceFile, folder: Path) -> list[str]:
    """Return accesses to states in the generated source that are not in the list of accesses."""
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
    for each in find_input_uses(file.with_suffix(".cpp").read_text(), calls):
        state = piece.ins[each.input_index] if 0 <= each.input_index < len(piece.ins) else ""
        if each.input_index >= 0 and state not in piece.states:
            continue
        reads, writes = listed.get(state, (False, False))
        if not each.is_understood:
            found.append(f"a line of its source cannot be parsed: {each.callee}")
        elif each.reads and not reads:
            found.append(f"{each.callee} reads {state}, which is not listed")
        elif each.writes and not writes:
            found.append(f"{each.callee} writes to {state}, which is not listed")
    return found


def _evaluate(text: str, sizes: dict[str, int]) -> int:
    """Return the value of an expression for a number of bytes at these sizes; other names count as 1."""
    return int(evaluate(text or "0", lambda name: sizes.get(name, 1)))


_BEGIN, _END = "void AOTInductorModel::run_impl(", "} // AOTInductorModel::run_impl"
_INPUT = re.compile(r"^auto (\w+) = std::move\(inputs\[(\d+)\]\);$")
_HARMLESS = (
    re.compile(r"^auto \w+_(size|stride) = \w+\.(sizes|strides)\(\);$"),
    re.compile(r"^if \(_check_aoti_runtime_check_inputs_env\(\)\) \{ assert_size_stride\(.*\); \}$"),
    re.compile(r"^\w+\.reset\(\);$"),
    re.compile(r"^//"),
    re.compile(r"^int64_t \w+ = \w+_size\[\d+\];$"),
)
_KERNEL = re.compile(r"^(?:kernels\.)?(cpp_\w+)\(")
_TORCH = re.compile(r"aoti_torch_(?:cpu_)?(\w+)\(")
_PROXY = re.compile(r"aoti_torch_proxy_executor_call_function\(proxy_executor, (\d+),")


@dataclass(frozen=True)
class InputUse:
    """A source line that uses an input: the callee, whether it may read or write, and whether it was parsed."""

    input_index: int
    callee: str
    reads: bool
    writes: bool
    is_understood: bool = True


def find_input_uses(source: str, calls: Sequence[Any]) -> Iterator[InputUse]:
    """Yield all lines of `run_impl` that use an input, except those that only read its sizes."""
    begin = source.find(_BEGIN)
    if begin < 0 or _END not in source[begin:]:
        yield InputUse(-1, "the source has no run_impl", False, False, is_understood=False)
        return
    names: dict[str, int] = {}
    for raw in source[begin : source.index(_END, begin)].splitlines():
        line = raw.strip()
        if (given := _INPUT.match(line)) is not None:
            names[given[1]] = int(given[2])
            continue
        found = [name for name in dict.fromkeys(re.findall(r"\w+", line)) if name in names]
        if not found or any(pattern.match(line) for pattern in _HARMLESS):
            continue
        for name in found:
            yield _classify_use(line, name, names[name], calls)


def _classify_use(line: str, name: str, number: int, calls: Sequence[Any]) -> InputUse:
    if (kernel := _KERNEL.match(line)) is not None:
        reads = re.search(rf"\(const [\w:]+\*\)\({name}\b", line) is not None
        writes = re.search(rf"\((?!const )[\w:]+\*\)\({name}\b", line) is not None
        return InputUse(number, kernel[1], reads, writes, is_understood=reads or writes)
    if (proxy := _PROXY.search(line)) is not None and int(proxy[1]) < len(calls):
        target = calls[int(proxy[1])]["node"]["target"]
        return InputUse(number, target, True, False)
    if (torch := _TORCH.search(line)) is not None:
        return InputUse(number, torch[1], True, torch[1].endswith("_") or "_out" in torch[1] or "copy_" in torch[1])
    return InputUse(number, line[:80], False, False, is_understood=False)
