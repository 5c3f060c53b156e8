"""The flow: a model is captured, transformed, lowered and packed. `inlay.build` is this file."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from torch.export import ExportedProgram

from inlay.build_cache.key import BuildRequest
from inlay.build_cache.lookup import Lookup, lookup_build, restore_build, store_build
from inlay.config import resolve_config
from inlay.errors import ContractError, ModelError, UsageError
from inlay.frontend import Example, SourceModel, capture, open_model
from inlay.frontend.huggingface.checkpoint import HFOptions
from inlay.frontend.tokenizer import save_tokenizer
from inlay.lowering.lower import LoweredProgram, compile_lowered, lower
from inlay.lowering.state.buffers import drop_overwritten_buffers, lift_mutated_buffers
from inlay.lowering.state.declared_aliases import declare_aliases
from inlay.lowering.state.in_place_writes import copy_remarks
from inlay.lowering.state.state_copies import find_compiled_copies
from inlay.package import store
from inlay.package.writer import Contents, pack
from inlay.program.bindings import Role
from inlay.program.decoder import SIGNATURE, has_kv_cache, is_stateless_decoder
from inlay.program.remarks import RemarkKind
from inlay.program.weights import quantized_blocks
from inlay.transforms import TransformRecord, configure, run
from inlay.transforms.base import Stage
from inlay.transforms.instruments import dump_instruments
from inlay.transforms.lock import Lock, lock_model, versions
from inlay.transforms.structured_trace import trace_instruments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from inlay.config import ResolvedConfig
    from inlay.lowering.executable import Executable
    from inlay.package.manifest import Manifest
    from inlay.program.program import Program
    from inlay.transforms.pass_manager import Instrument

Model = str | SourceModel | Example | ExportedProgram
"""What is built: the name of a model, or the model."""
DECODER = ("insert_kv_cache.enabled=true", f"gather_last_logits.output={SIGNATURE.logits}")
"""Settings for a model that takes tokens and returns logits."""


PACKED_FORMATS = {
    "stored": ("format=stored",),
    "int4": ("format=int4", "group=32"),
    "int4-g64": ("format=int4", "group=64"),
    "int4-g128": ("format=int4", "group=128"),
    "int8": ("format=int8",),
    "bfloat16": ("format=bfloat16",),
    "float32": ("format=float32",),
}
"""Formats that weights are packed in: what `pack_weights` is told."""
PLAIN_FORMATS = ("float32", "bfloat16", "float16")
"""Formats that a whole program may be in."""


@dataclass(frozen=True)
class BuildOptions:
    """What a build may be asked for."""

    max_length: int = 2048
    max_batch: int = 8
    buckets: tuple[str, ...] | None = None
    """Sizes to compile for separately, beside all of them; by default single tokens, for a decoder."""
    weights: str = ""
    """Number format of the weights: one of torch's, or one of `PACKED_FORMATS`; by default the checkpoint's own."""
    kernels: str = "native"
    """What code is made for: this processor, or any with AVX2."""
    config: tuple[Path, ...] = ()
    settings: tuple[str, ...] = ()
    alias: Mapping[str | int, str | int] = field(default_factory=dict)
    """Outputs that live in the storage of inputs."""
    dump: Path | None = None
    """Folder for the program before and after each transform; by default the one that INLAY_DUMP_GRAPHS_DIR names."""
    trust_remote_code: bool = False
    use_cache: bool = True
    """Whether what was built before may be used, and the result be kept."""


@dataclass(frozen=True)
class BuildResult:
    """A package that was built, and what happened on the way."""

    path: Path
    manifest: Manifest
    records: tuple[TransformRecord, ...]
    seconds: Mapping[str, float]
    """Stage → how long it took."""
    left_out: tuple[str, ...] = ()
    """Modules that are not part of the package, such as the vision part of a multimodal model."""
    cache: Lookup = field(default_factory=Lookup, repr=False)
    """What was found in the cache, and why not more."""


@dataclass(frozen=True)
class Prepared:
    """A captured program with its state declared and lifted, and the configuration of the transforms for it."""

    captured: Program
    program: Program
    config: ResolvedConfig


def build(
    model: Model,
    path: str | Path,
    options: BuildOptions | None = None,
    *,
    on_step: Callable[[str], None] = lambda step: None,
) -> BuildResult:
    """Build a package from MODEL: capture, transform, lower, pack; or restore it from the build cache."""
    options, path, stage = options or BuildOptions(), Path(path), _StageTimer()
    store.check_free(path)
    source = _open_source(model, options)
    with stage("capture"):
        prepared = prepare(capture(source, on_step=on_step), options)
    with lookup_build(lambda: _build_request(prepared, options), source.name, on_step) as lookup:
        with stage("cache"):
            contents = partial(_contents, source, _name(model), prepared)
            restored = restore_build(lookup, path, prepared.captured, contents, on_step)
        if restored:
            return BuildResult(path, *restored, stage.seconds, prepared.captured.facts.left_out, lookup)
        with stage("transform"):
            program, records = transform(prepared, options, on_step)
        with stage("lower"):
            lowered = lower_program(program, options)
        with stage("pack"):
            manifest = pack(lowered, path, contents(records), on_step, options.kernels)
        store_build(lookup, path, manifest, records, stage.total("transform", "lower", "pack"))
    return BuildResult(path, manifest, records, stage.seconds, prepared.captured.facts.left_out, lookup)


def compile_model(model: Model, backend: str = "inductor", options: BuildOptions | None = None) -> Executable:
    """The same flow without a package: a model compiled by a backend, to run in this process."""
    options = options or BuildOptions()
    program, _ = transform(prepare(capture(_open_source(model, options)), options), options)
    return compile_lowered(lower_program(program, options), backend)


def prepare(captured: Program, options: BuildOptions) -> Prepared:
    """Declare and lift the state of a captured program, and resolve the configuration of its transforms."""
    program = declare_aliases(captured, options.alias) if options.alias else captured
    program = lift_mutated_buffers(drop_overwritten_buffers(program))
    settings = [*_decoder_settings(program, options), *_weight_settings(program, options), *options.settings]
    config = resolve_config(
        architecture=program.facts.architecture, model=program.name, files=options.config, settings=settings
    )
    return Prepared(captured, program, config)


def transform(
    prepared: Prepared, options: BuildOptions, on_step: Callable[[str], None] = lambda step: None
) -> tuple[Program, tuple[TransformRecord, ...]]:
    """Run the configured transforms. A decoder without state of its own gets a cache."""
    on_step("transforming")
    instruments: list[Instrument] = [*dump_instruments(options.dump), *trace_instruments()]
    program, records = run(prepared.program, configure(prepared.config), instruments, optional_matches=True)
    if is_stateless_decoder(prepared.program.bindings) and not has_kv_cache(program.bindings):
        _refuse_without_state(program, records)
    return program, (*records, *_copied_state(program))


def lower_program(program: Program, options: BuildOptions) -> LoweredProgram:
    """A transformed program cut into pieces, as it would be packed; nothing is compiled."""
    default = ("length=1",) if has_kv_cache(program.bindings) else ()
    return lower(program, default if options.buckets is None else options.buckets)


def _copied_state(program: Program) -> list[TransformRecord]:
    """A record with a remark for every state that compiled code copies or may copy."""
    remarks = tuple(replace(each, kind=RemarkKind.ANALYSIS) for each in copy_remarks(find_compiled_copies(program)))
    return [TransformRecord("in_place", "in_place", Stage.LOWER.value, "analysis", remarks=remarks)] if remarks else []


def _refuse_without_state(program: Program, records: Sequence[TransformRecord]) -> None:
    """A decoder that brings positions together and got no cache would begin anew with every token."""
    for record in records:
        for remark in record.remarks:
            if record.key == "insert_kv_cache" and remark.kind is RemarkKind.REFUSED:
                raise ContractError(
                    f"{program.name} cannot be built as a decoder: {remark.reason.removeprefix('refused: ')}"
                    f"{f' (at {remark.source})' if remark.source else ''}.",
                    "State other than keys and values is not supported yet; `--set insert_kv_cache.enabled=false`"
                    " builds a program that is given whole sequences.",
                )


def _build_request(prepared: Prepared, options: BuildOptions) -> BuildRequest | str:
    """What the result of a build depends on, or why nothing is to be taken from the cache."""
    if not options.use_cache:
        return "The cache was not asked."
    if dump_instruments(options.dump):
        return "The programs on the way are to be written, so the transforms have to run."
    if trace_instruments():
        return "The programs on the way are traced (TORCH_TRACE), so the transforms have to run."
    asked = {"buckets": repr(options.buckets), "aliases": repr(sorted(map(str, options.alias.items())))}
    return BuildRequest(prepared.captured, prepared.config, configure(prepared.config), options.kernels, asked)


def _name(model: Model) -> str:
    """What to call a model so that it is found again: what was asked for, or else its own name."""
    if isinstance(model, Example):
        return type(model.module).__name__
    if isinstance(model, ExportedProgram):
        return "exported"
    return model if isinstance(model, str) else model.name


def _open_source(model: Model, options: BuildOptions) -> SourceModel:
    if isinstance(model, str):
        import torch

        known = dict.fromkeys((*PLAIN_FORMATS, *PACKED_FORMATS))
        if options.weights and options.weights not in known:
            raise UsageError(f"There is no number format {options.weights}.", f"Use {', '.join(known)}.")
        dtype = getattr(torch, options.weights) if options.weights in PLAIN_FORMATS else None
        return open_model(model, HFOptions(dtype, options.trust_remote_code))
    if isinstance(model, ExportedProgram):
        return SourceModel.from_exported(model)
    return SourceModel(_name(model), "module", model, {}) if isinstance(model, Example) else model


def _decoder_settings(program: Program, options: BuildOptions) -> list[str]:
    if not is_stateless_decoder(program.bindings):
        return []
    most = program.facts.max_length.value if program.facts.max_length else options.max_length
    room = min(options.max_length, most)
    lengths = [f"{name}.max_length={room}" for name in ("fold_length_comparisons", "insert_kv_cache")]
    return [*DECODER, *lengths, f"insert_kv_cache.max_batch={options.max_batch}"]


def _weight_settings(program: Program, options: BuildOptions) -> list[str]:
    """How weights are packed: as asked for, or else as a decoder's checkpoint holds them."""
    decoder, wanted = is_stateless_decoder(program.bindings), options.weights
    rows = program.bindings.with_role(Role.PARAMETER)
    if decoder and not wanted:
        blocks = any((ref := program.tensors.get(row.name)) and quantized_blocks(ref) for row in rows)
        held = {row.dtype for row in rows}
        wanted = "stored" if blocks else held.pop() if len(held) == 1 else ""
    if wanted not in PACKED_FORMATS or (wanted == "float32" and not decoder):
        return []
    # Beside integers, a cache in float32 would be most of what is read.
    cache = ["insert_kv_cache.dtype=bfloat16"] if decoder and wanted not in PLAIN_FORMATS else []
    # Nobody asked for it: where no weight can be packed, as in a small model, none is.
    asked = () if options.weights else ("expect=any", "reason=weights that cannot be packed stay as they are")
    return [*(f"pack_weights.{each}" for each in ("enabled=true", *PACKED_FORMATS[wanted], *asked)), *cache]


def _contents(source: SourceModel, name: str, prepared: Prepared, records: Sequence[TransformRecord]) -> Contents:
    """What a package holds beside code and weights; the lock names the model as it was asked for."""
    lock = Lock(versions=versions(), models=[lock_model(name, prepared.captured, prepared.config, records)])
    remarks = [remark.to_json() for record in records for remark in record.remarks]
    settings = {
        entry.key: {name: setting.value for name, setting in entry.options.items()} for entry in prepared.config.entries
    }
    tokenizer = source.load_tokenizer
    return Contents(
        model=source.name,
        texts={
            "matches.lock": lock.text(),
            "resolved.yaml": yaml.safe_dump({"transforms": settings}, sort_keys=False),
            "remarks.jsonl": "".join(json.dumps(remark, ensure_ascii=False) + "\n" for remark in remarks),
        },
        save_tokenizer=None if tokenizer is None else lambda folder: _save_tokenizer(tokenizer, folder),
        encoder=source.encoder,
    )


def _save_tokenizer(tokenizer: Callable[[], Any], folder: Path) -> None:
    """A model without a tokenizer is packed without one: token numbers go in and out."""
    try:
        save_tokenizer(tokenizer(), folder)
    except ModelError as error:
        folder.mkdir(exist_ok=True)
        (folder / "missing.txt").write_text(f"{error.problem}\n")


class _StageTimer:
    """How long stages take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def total(self, *names: str) -> float:
        """How long these stages took together."""
        return sum(self.seconds[name] for name in names)
