"""From plans to a package: pieces compiled, weights streamed, all of it published at once."""

from __future__ import annotations

import json
import math
import platform
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from inlay import host
from inlay.compile import manifest as manifests
from inlay.compile import store, verify, weights_file
from inlay.compile.aoti import build_library
from inlay.compile.calls import encode
from inlay.compile.kernels import choose
from inlay.compile.manifest import (
    Bucket,
    FileRow,
    Manifest,
    PieceFile,
    Step,
    Target,
    WeightRow,
    WeightsFile,
    decoding,
)
from inlay.compile.plan import plan
from inlay.errors import MachineError, UsageError, nearest
from inlay.ops import native
from inlay.program.bindings import Role
from inlay.program.weights import Derived

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from inlay.compile.plan import Piece, Plan
    from inlay.program.program import Program

Sizes = dict[str, tuple[int, int | None]]


@dataclass(frozen=True)
class Lowered:
    """A program cut into pieces, once for each bucket of sizes; the last one takes all sizes."""

    program: Program
    buckets: tuple[tuple[str, Sizes, Plan], ...]

    @property
    def compiled(self) -> list[Piece]:
        """The pieces that a compiler has to work on."""
        return [piece for _, _, each in self.buckets for piece in each.pieces if not piece.plain]


def lower(program: Program, buckets: Sequence[str] = (), cuts: Sequence[Sequence[str]] | None = None) -> Lowered:
    """Plans for each of these buckets (`length=1`, `batch=1,length=2..64`), and one for every size.

    `cuts` are those of `plan`.
    """
    every: Sizes = {symbol.name: (symbol.low, symbol.high) for symbol in program.symbols.values()}
    wanted = [_sizes(text, every) for text in buckets]
    named = [(text.replace(" ", ""), sizes) for text, sizes in zip(buckets, wanted, strict=True)]
    plans = ((name, sizes, plan(program, sizes, cuts)) for name, sizes in (*named, ("all", every)))
    return Lowered(program, tuple(plans))


def _sizes(text: str, every: Sizes) -> Sizes:
    """A bucket from its text.

    >>> _sizes("length=1", {"batch": (1, 4), "length": (1, 64)})
    {'batch': (1, 4), 'length': (1, 1)}
    """
    sizes = dict(every)
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        low, dots, high = value.partition("..")
        if not equals or not low.isdigit() or (high and not high.isdigit()):
            raise UsageError(
                f"{text!r} is not a bucket.", "Write --buckets length=1 or --buckets batch=1,length=2..64."
            )
        if name not in every:
            raise UsageError(f"The program has no size {name}.", nearest(name, every) or f"It has {', '.join(every)}.")
        floor, ceiling = every[name]
        least, most = int(low), int(high) if high else ceiling if dots else int(low)
        if least < floor or (ceiling is not None and (most is None or most > ceiling)):
            raise UsageError(f"{text}: {name} must be within {floor} … {ceiling}.")
        sizes[name] = (least, most)
    return sizes


@dataclass(frozen=True)
class Contents:
    """What a package holds beside code and weights."""

    model: str
    architecture: str = ""
    kind: str = "program"
    facts: Mapping[str, int] | None = None
    texts: Mapping[str, str] | None = None
    """Files by name."""
    save_tokenizer: Callable[[Path], None] | None = None


def pack(
    lowered: Lowered,
    path: Path,
    contents: Contents,
    on_step: Callable[[str], None] = lambda step: None,
    level: str = "native",
) -> Manifest:
    """Compile what has to be for processors of a level, and write the package."""
    with store.staged(path) as folder:
        _check_space(lowered.program, folder)
        native.copy(folder / native.NAME, level)
        buckets = _compiled(lowered, folder, on_step, level)
        rows, read, initial = _weights(lowered, buckets)
        draft = Manifest(
            model=contents.model,
            architecture=contents.architecture,
            kind=contents.kind,
            bindings=lowered.program.bindings,
            buckets=buckets,
            weights=rows,
            weights_file=WeightsFile(0, ()),
            files={},
            target=_target(level),
            initial=initial,
            facts=dict(contents.facts or {}),
            inlay=host.version("inlay"),
        )
        manifest = completed(draft, folder, contents, read, on_step)
        store.publish(path, folder, manifest.text())
    return manifest


def _check_space(program: Program, folder: Path) -> None:
    """Refuse now what would fail after all is compiled."""
    rows = program.bindings.of(Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
    needed = sum(math.prod(map(int, row.shape)) * getattr(torch, row.dtype).itemsize for row in rows if row.is_tensor)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"The weights take {needed / 1e6:,.1f} MB, and {folder.parent} has {free / 1e6:,.1f} MB left.",
            "Free some, or write to another disk.",
        )


def completed(
    draft: Manifest,
    folder: Path,
    contents: Contents,
    read: Callable[[str], torch.Tensor],
    on_step: Callable[[str], None] = lambda step: None,
) -> Manifest:
    """Write what a package holds beside its code into a folder; the manifest that knows all files in there."""
    on_step("writing weights")
    written = weights_file.write(folder / weights_file.NAME, draft.weights, read)
    on_step("writing the package")
    for name, text in (contents.texts or {}).items():
        (folder / name).write_text(text)
    if contents.save_tokenizer is not None:
        (folder / "tokenizer").mkdir()
        contents.save_tokenizer(folder / "tokenizer")
    files = {
        file.relative_to(folder).as_posix(): _file_row(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != weights_file.NAME
    }
    return replace(draft, model=contents.model, weights_file=written, files=files)


def add_texts(path: Path, texts: Mapping[str, str]) -> Manifest:
    """A package with these files too, by name; those of the same names are replaced. All else stays as it is."""
    folder = store.locate(path)
    manifest = verify.read(folder)
    verify.check(manifest, folder)
    with store.staged(path) as staging:
        store.carry([name for name in (*manifest.files, weights_file.NAME) if name not in texts], folder, staging)
        for name, text in texts.items():
            (staging / name).write_text(text)
        rows = {name: _file_row(staging / name) for name in texts}
        made = replace(manifest, files=manifest.files | rows)
        store.publish(path, staging, made.text())
    return made


def _file_row(file: Path) -> FileRow:
    return FileRow(file.stat().st_size, manifests.sha256(file))


def _compiled(lowered: Lowered, folder: Path, on_step: Callable[[str], None], level: str) -> tuple[Bucket, ...]:
    """The pieces of all buckets, as files of a folder."""
    made: dict[Piece, PieceFile] = {}
    all_sizes = [sizes for _, sizes, _ in lowered.buckets]
    decodes = decoding(all_sizes)
    for number, (name, sizes, each) in reversed(list(enumerate(lowered.buckets))):
        # Kernels are those of the phase: all buckets for answers compute a row alike, and so do all others.
        phase = all_sizes[-1] | ({"length": sizes["length"]} if decodes[number] else {})
        for piece in each.pieces:
            same = next((other for other in made if _serves(other, piece)), None)
            on_step(f"compiling {piece.name} ({name})" if not piece.plain and same is None else "")
            stem = folder / f"{number}-{piece.name}"
            prefill = any(decodes) and not decodes[number]
            made[piece] = made[same] if same else _write_piece(piece, phase, stem, level, prefill=prefill)
    plans = [(name, sizes, each, _by_target(each.steps, lowered.program)) for name, sizes, each in lowered.buckets]
    return tuple(
        Bucket(name, sizes, tuple(made[piece] for piece in each.pieces), steps, each.results)
        for name, sizes, each, steps in plans
    )


def _serves(other: Piece, piece: Piece) -> bool:
    """Whether a piece made for more sizes can be used here: it is no block, which is worth code of its own."""
    if piece.repeats or other.repeats or piece.name != other.name:
        return False
    calls = [[node.target for node in each.program.graph.nodes if node.op != "placeholder"] for each in (piece, other)]
    kinds = [[(row.name, row.role, row.dtype) for row in each.program.bindings] for each in (piece, other)]
    return calls[0] == calls[1] and kinds[0] == kinds[1]


def _write_piece(piece: Piece, sizes: Sizes, stem: Path, level: str, *, prefill: bool) -> PieceFile:
    ins = tuple(row.name for row in piece.ins)
    outs = tuple(row.name for row in piece.program.bindings.outs if row.alias is None)
    if piece.plain:
        file = stem.with_suffix(".json")
        file.write_text(json.dumps(encode(piece.program.graph), indent=1))
        return PieceFile(piece.name, file.name, (), ins, outs)
    program, kernels = choose(piece.program, sizes, level, prefill=prefill)
    built = build_library(program, piece.states, level)
    file = stem.with_suffix(".so")
    file.write_bytes(built.library)
    file.with_suffix(".cpp").write_text(built.source)
    file.with_suffix(".json").write_text(json.dumps({"nodes": built.calls}))
    accesses = tuple(each.to_json() for each in built.accesses)
    written = tuple(row.name for row in piece.program.bindings.state)
    return PieceFile(
        piece.name, file.name, built.constants, ins, outs, piece.states, written, accesses, len(built.calls), kernels
    )


def _by_target(steps: Sequence[Step], program: Program) -> tuple[Step, ...]:
    """Steps that name weights as users know them."""
    names = {row.name: row.target for row in program.bindings.ins}
    return tuple(replace(step, constants=tuple(names[each] for each in step.constants)) for step in steps)


def _weights(
    lowered: Lowered, buckets: Sequence[Bucket]
) -> tuple[dict[str, WeightRow], Callable[[str], torch.Tensor], dict[str, str]]:
    """The tensors the steps bind, and the values that state starts with; how to read each."""
    program = lowered.program
    used = {name for bucket in buckets for step in bucket.steps for name in step.constants}
    initial = {row.name: row.target for row in program.bindings.state if row.name in program.tensors}
    rows: dict[str, WeightRow] = {}
    homes: dict[str, str] = {}
    for row in program.bindings.ins:
        if row.target not in used and row.name not in initial:
            continue
        ref: Any = program.tensors[row.name]
        sources: tuple[str, ...] = (row.target,) if row.persistent and row.role is not Role.INPUT else ()
        way = "same"
        if isinstance(ref, Derived):
            sources, way = tuple(ref.sources), ref.map
        rows[row.target] = WeightRow(row.dtype, tuple(int(size) for size in row.shape), sources, way)
        homes[row.target] = row.name
    return rows, lambda name: program.tensors[homes[name]].read(), initial


def _target(level: str) -> Target:
    version = torch.__version__.partition("+")[0]
    features = host.cpu_features() if level == "native" else ("avx2",)
    return Target(version, platform.machine(), features, torch.get_num_threads())
