"""Writes a package: compiles the pieces of plans, streams the weights and publishes the result atomically."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from inlay import machine
from inlay.errors import MachineError
from inlay.lowering.aoti import build_library
from inlay.lowering.buckets import Bucket, PieceFile, PlanStep, find_decode_buckets
from inlay.lowering.eager_graph import encode
from inlay.lowering.kernel_choice import choose_kernels
from inlay.ops import native
from inlay.package import manifest as manifests
from inlay.package import store, weights_file
from inlay.package.manifest import FileRow, Manifest, Target, WeightRow, WeightsFile
from inlay.program.bindings import Role
from inlay.program.decoder import SIGNATURE, has_kv_cache
from inlay.program.weights import DerivedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from inlay.lowering.lower import LoweredProgram, SizeRanges
    from inlay.lowering.plan import Piece
    from inlay.program.encoder import EncoderFacts
    from inlay.program.program import Program


@dataclass(frozen=True)
class Contents:
    """Contents of a package other than code and weights."""

    model: str
    texts: Mapping[str, str] | None = None
    """File name → text."""
    save_tokenizer: Callable[[Path], None] | None = None
    encoder: EncoderFacts | None = None


def pack(
    lowered: LoweredProgram,
    path: Path,
    contents: Contents,
    on_step: Callable[[str], None] = lambda step: None,
    level: str = "native",
) -> Manifest:
    """Compile the pieces for processors of this level, and write the package."""
    with store.stage_version(path) as folder:
        program = lowered.program
        decodes = has_kv_cache(program.bindings)
        _check_space(program, folder)
        native.install(folder / native.LIBRARY_NAME, level)
        buckets = _compile_pieces(lowered, folder, on_step, level)
        rows, read, initial = _weights(lowered, buckets)
        draft = Manifest(
            model=contents.model,
            architecture=program.facts.architecture,
            kind="program",
            decoder=SIGNATURE if decodes else None,
            bindings=program.bindings,
            buckets=buckets,
            weights=rows,
            weights_file=WeightsFile(0, ()),
            files={},
            target=_target(level),
            initial=initial,
            facts={name: fact.value for name, fact in program.facts.items()},
            inlay=machine.package_version("inlay"),
        )
        manifest = write_contents(draft, folder, contents, read, on_step)
        store.publish(path, folder, manifest.text())
    return manifest


def _check_space(program: Program, folder: Path) -> None:
    """Check the free disk space before compiling."""
    rows = program.bindings.with_role(Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
    needed = sum(row.nbytes for row in rows if row.is_tensor)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"The weights need {needed / 1e6:,.1f} MB, but {folder.parent} has {free / 1e6:,.1f} MB free.",
            "Free some space, or write to another disk.",
        )


def write_contents(
    draft: Manifest,
    folder: Path,
    contents: Contents,
    read: Callable[[str], torch.Tensor],
    on_step: Callable[[str], None] = lambda step: None,
) -> Manifest:
    """Write weights, texts and tokenizer into a folder; return the manifest that lists all its files."""
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
    encoder = contents.encoder
    kind = "decoder" if draft.decoder else "encoder" if encoder else "program"
    return replace(draft, model=contents.model, kind=kind, encoder=encoder, weights_file=written, files=files)


def _file_row(file: Path) -> FileRow:
    return FileRow(file.stat().st_size, manifests.sha256(file))


def _compile_pieces(
    lowered: LoweredProgram, folder: Path, on_step: Callable[[str], None], level: str
) -> tuple[Bucket, ...]:
    """Write the pieces of all buckets into a folder; return the buckets."""
    made: dict[Piece, PieceFile] = {}
    all_sizes = [sizes for _, sizes, _ in lowered.buckets]
    decodes = find_decode_buckets(all_sizes)
    for number, (name, sizes, each) in reversed(list(enumerate(lowered.buckets))):
        # Kernels are chosen per phase, so that all decode buckets compute a row identically, and all others too.
        phase = all_sizes[-1] | ({"length": sizes["length"]} if decodes[number] else {})
        for piece in each.pieces:
            same = next((other for other in made if _is_reusable(other, piece)), None)
            on_step(f"compiling {piece.name} ({name})" if not piece.is_eager and same is None else "")
            stem = folder / f"{number}-{piece.name}"
            prefill = any(decodes) and not decodes[number]
            made[piece] = made[same] if same else _write_piece(piece, phase, stem, level, prefill=prefill)
    plans = [
        (name, sizes, each, _use_weight_names(each.steps, lowered.program)) for name, sizes, each in lowered.buckets
    ]
    return tuple(
        Bucket(name, sizes, tuple(made[piece] for piece in each.pieces), steps, each.results)
        for name, sizes, each, steps in plans
    )


def _is_reusable(other: Piece, piece: Piece) -> bool:
    """Whether a piece compiled for more sizes can be used here. Blocks of a fold are always compiled separately."""
    if piece.is_block or other.is_block or piece.name != other.name:
        return False
    calls = [[node.target for node in each.program.graph.nodes if node.op != "placeholder"] for each in (piece, other)]
    kinds = [[(row.name, row.role, row.dtype) for row in each.program.bindings] for each in (piece, other)]
    return calls[0] == calls[1] and kinds[0] == kinds[1]


def _write_piece(piece: Piece, sizes: SizeRanges, stem: Path, level: str, *, prefill: bool) -> PieceFile:
    ins = tuple(row.name for row in piece.ins)
    outs = tuple(row.name for row in piece.program.bindings.outs if row.alias is None)
    if piece.is_eager:
        file = stem.with_suffix(".json")
        file.write_text(json.dumps(encode(piece.program.graph), indent=1))
        return PieceFile(piece.name, file.name, (), ins, outs)
    program, kernels = choose_kernels(piece.program, sizes, level, prefill=prefill)
    built = build_library(program, piece.states, level)
    file = stem.with_suffix(".so")
    file.write_bytes(built.library)
    file.with_suffix(".cpp").write_text(built.source)
    file.with_suffix(".json").write_text(json.dumps({"nodes": built.fallback_calls}))
    accesses = tuple(each.to_json() for each in built.accesses)
    written = tuple(row.name for row in piece.program.bindings.state)
    return PieceFile(
        piece.name,
        file.name,
        built.constants,
        ins,
        outs,
        piece.states,
        written,
        accesses,
        len(built.fallback_calls),
        kernels,
    )


def _use_weight_names(steps: Sequence[PlanStep], program: Program) -> tuple[PlanStep, ...]:
    """Replace binding names of weights by their names in the model."""
    names = {row.name: row.target for row in program.bindings.ins}
    return tuple(replace(step, constants=tuple(names[each] for each in step.constants)) for step in steps)


def _weights(
    lowered: LoweredProgram, buckets: Sequence[Bucket]
) -> tuple[dict[str, WeightRow], Callable[[str], torch.Tensor], dict[str, str]]:
    """Return the tensors that steps bind, a function to read each, and the initial values of states."""
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
        if isinstance(ref, DerivedTensor):
            sources, way = tuple(ref.sources), ref.map
        rows[row.target] = WeightRow(row.dtype, tuple(int(size) for size in row.shape), sources, way)
        homes[row.target] = row.name
    return rows, lambda name: program.tensors[homes[name]].read(), initial


def _target(level: str) -> Target:
    version = torch.__version__.partition("+")[0]
    features = machine.cpu_features() if level == "native" else ("avx2",)
    return Target(version, platform.machine(), features, torch.get_num_threads())
