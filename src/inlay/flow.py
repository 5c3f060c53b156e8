"""The flow: a model is captured, transformed, lowered and packed. `inlay.build` is this file."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from inlay.capture import Example, Model, capture, open_model
from inlay.capture.hf import HFOptions
from inlay.capture.tokenizer import save_tokenizer
from inlay.compile import store
from inlay.compile.factors import Request
from inlay.compile.in_process import compile_lowered
from inlay.compile.kept import Lookup, keep, looked_up, restored
from inlay.compile.pack import Contents, Lowered, lower, pack
from inlay.config import resolve
from inlay.errors import ContractError, ModelError, UsageError
from inlay.program.bindings import Role
from inlay.program.remarks import RemarkKind
from inlay.program.weights import quantised
from inlay.state import declare, lift_mutated_buffers, remarks_on, under_compilers
from inlay.transforms import Record, configure, run
from inlay.transforms.base import Stage
from inlay.transforms.instruments import Dump
from inlay.transforms.library.insert_kv_cache import LENGTHS
from inlay.transforms.lock import Lock, locked, versions
from inlay.transforms.structured_trace import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.compile.execute import Executable
    from inlay.compile.manifest import Manifest
    from inlay.config import Resolved
    from inlay.program.program import Program
    from inlay.transforms.pipeline import Instrument

_T = TypeVar("_T")
DECODER = ("insert_kv_cache.enabled=true", "gather_last_logits.output=logits")
"""Settings for a model that tokens go into and scores come out of."""


PACKED = {
    "stored": ("format=stored",),
    "int4": ("format=int4", "group=32"),
    "int4-g64": ("format=int4", "group=64"),
    "int4-g128": ("format=int4", "group=128"),
    "int8": ("format=int8",),
    "bfloat16": ("format=bfloat16",),
    "float32": ("format=float32",),
}
"""Formats that weights are packed in: what `pack_weights` is told."""
PLAIN = ("float32", "bfloat16", "float16")
"""Formats that a whole program may be in."""


@dataclass(frozen=True)
class Options:
    """What a build may be asked for."""

    max_length: int = 2048
    max_batch: int = 1
    buckets: tuple[str, ...] | None = None
    """Sizes to compile for separately, beside all of them; by default single tokens, for a decoder."""
    weights: str = ""
    """Number format of the weights: one of torch's, or one of `PACKED`; by default the checkpoint's own."""
    kernels: str = "native"
    """What code is made for: this processor, or any with AVX2."""
    config: tuple[Path, ...] = ()
    settings: tuple[str, ...] = ()
    alias: Mapping[str | int, str | int] = field(default_factory=dict)
    """Outputs that live in the storage of inputs."""
    dump: Path | None = None
    """Folder for the program before and after each transform."""
    trust_remote_code: bool = False
    cache: bool = True
    """Whether what was built before may be used, and the result be kept."""


@dataclass(frozen=True)
class Built:
    """A package that was built, and what happened on the way."""

    path: Path
    manifest: Manifest
    records: tuple[Record, ...]
    seconds: Mapping[str, float]
    """Stage → how long it took."""
    cache: Lookup = field(default_factory=Lookup, repr=False)
    """What was found in the cache, and why not more."""


def build(
    model: str | Model | Example,
    path: str | Path,
    options: Options | None = None,
    *,
    on_step: Callable[[str], None] = lambda step: None,
) -> Built:
    """Build a package from MODEL: captured, transformed, lowered, packed; or taken from what was built before."""
    options, path, clock = options or Options(), Path(path), _Clock()
    store.check_free(path)
    source = _opened(model, options)
    captured = clock("capture", lambda: capture(source, on_step=on_step))
    with looked_up(lambda: _asked(captured, options), source.name, on_step) as found:
        known = clock("cache", lambda: _restored(found, model, source, captured, options, path, on_step))
        if known:
            return Built(path, *known, clock.seconds, found)
        program, resolved, records = clock("transform", lambda: transform(captured, options, on_step))
        pieces = clock("lower", lambda: lowered(program, options))
        lock = Lock(versions=versions(), models=[locked(_name(model), captured, resolved, records)])
        contents = _contents(source, program, resolved, records, lock)
        manifest = clock("pack", lambda: pack(pieces, path, contents, on_step, options.kernels))
        keep(found, path, manifest, records, clock.spent("transform", "lower", "pack"))
    return Built(path, manifest, tuple(records), clock.seconds, found)


def compiled(model: str | Model | Example, engine: str = "inductor", options: Options | None = None) -> Executable:
    """The same flow without a package: a model compiled by an engine, to run in this process."""
    options = options or Options()
    program = transform(capture(_opened(model, options)), options)[0]
    return compile_lowered(lowered(program, options), engine)


def transform(
    program: Program, options: Options, on_step: Callable[[str], None] = lambda step: None
) -> tuple[Program, Resolved, list[Record]]:
    """Run the configured transforms. A decoder without state of its own gets a cache."""
    on_step("transforming")
    program, resolved = prepared(program, options)
    instruments: list[Instrument] = [*([Dump(options.dump)] if options.dump else []), *tracing()]
    decoder = is_decoder(program)
    program, records = run(program, configure(resolved), instruments)
    if decoder and not _has_cache(program):
        _refuse_without_state(program, records)
    return program, resolved, [*records, *_copied_state(program)]


def _copied_state(program: Program) -> list[Record]:
    """A record with a remark for every state that compiled code copies or may copy."""
    remarks = tuple(replace(each, kind=RemarkKind.ANALYSIS) for each in remarks_on(under_compilers(program)))
    return [Record("in_place", "in_place", Stage.LOWER.value, "skipped", remarks=remarks)] if remarks else []


def _refuse_without_state(program: Program, records: Sequence[Record]) -> None:
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


def prepared(program: Program, options: Options) -> tuple[Program, Resolved]:
    """A captured program with its state declared and lifted, and the configuration of the transforms for it."""
    if options.alias:
        program = declare(program, options.alias)
    program = lift_mutated_buffers(program)
    settings = [*_for_decoders(program, options), *_for_weights(program, options), *options.settings]
    return program, resolve(
        architecture=program.facts.architecture, model=program.name, files=options.config, settings=settings
    )


def lowered(program: Program, options: Options) -> Lowered:
    """A transformed program cut into pieces, as it would be packed; nothing is compiled."""
    return lower(program, _buckets(program, options))


def _asked(captured: Program, options: Options) -> Request | str:
    """What the result of a build depends on, or why nothing is to be taken from the cache."""
    if not options.cache:
        return "The cache was not asked."
    if options.dump:
        return "The programs on the way are to be written, so the transforms have to run."
    if tracing():
        return "The programs on the way are traced (TORCH_TRACE), so the transforms have to run."
    resolved = prepared(captured, options)[1]
    asked = {"buckets": repr(options.buckets), "aliases": repr(sorted(map(str, options.alias.items())))}
    return Request(captured, resolved, configure(resolved), options.kernels, asked)


def _restored(
    found: Lookup,
    model: str | Model | Example,
    source: Model,
    captured: Program,
    options: Options,
    path: Path,
    on_step: Callable[[str], None],
) -> tuple[Manifest, tuple[Record, ...]] | None:
    """The package as it was built before, if it was; what names the model is written anew."""
    resolved = prepared(captured, options)[1]

    def contents(records: Sequence[Record]) -> Contents:
        lock = Lock(versions=versions(), models=[locked(_name(model), captured, resolved, records)])
        return _contents(source, captured, resolved, records, lock)

    known = restored(found, path, captured, contents, on_step)
    return (known[0], tuple(known[1])) if known else None


def is_decoder(program: Program) -> bool:
    """Whether tokens go in and scores come out, and no state is the model's own."""
    inputs = [row.target for row in program.bindings.of(Role.INPUT)]
    outputs = [row.name for row in program.bindings.outs]
    return inputs == ["input_ids"] and outputs == ["logits"]


def _name(model: str | Model | Example) -> str:
    """What to call a model so that it is found again: what was asked for, or else its own name."""
    if isinstance(model, Example):
        return type(model.module).__name__
    return model if isinstance(model, str) else model.name


def _opened(model: str | Model | Example, options: Options) -> Model:
    if isinstance(model, str):
        import torch

        known = dict.fromkeys((*PLAIN, *PACKED))
        if options.weights and options.weights not in known:
            raise UsageError(f"There is no number format {options.weights}.", f"Use {', '.join(known)}.")
        dtype = getattr(torch, options.weights) if options.weights in PLAIN else None
        return open_model(model, HFOptions(dtype, options.trust_remote_code))
    return Model(_name(model), "module", model, {}) if isinstance(model, Example) else model


def _for_decoders(program: Program, options: Options) -> list[str]:
    if not is_decoder(program):
        return []
    most = program.facts.max_length.value if program.facts.max_length else options.max_length
    room = min(options.max_length, most)
    return [*DECODER, f"insert_kv_cache.max_length={room}", f"insert_kv_cache.max_batch={options.max_batch}"]


def _for_weights(program: Program, options: Options) -> list[str]:
    """How weights are packed: as asked for, or else as a decoder's checkpoint holds them."""
    decoder, wanted = is_decoder(program), options.weights
    rows = program.bindings.of(Role.PARAMETER)
    if decoder and not wanted:
        blocks = any((ref := program.tensors.get(row.name)) and quantised(ref) for row in rows)
        held = {row.dtype for row in rows}
        wanted = "stored" if blocks else held.pop() if len(held) == 1 else ""
    if wanted not in PACKED or (wanted == "float32" and not decoder):
        return []
    # Beside integers, a cache in float32 would be most of what is read.
    cache = ["insert_kv_cache.dtype=bfloat16"] if decoder and wanted not in PLAIN else []
    # Nobody asked for it: where no weight can be packed, as in a small model, none is.
    asked = () if options.weights else ("expect=any", "reason=weights that cannot be packed stay as they are")
    return [*(f"pack_weights.{each}" for each in ("enabled=true", *PACKED[wanted], *asked)), *cache]


def _buckets(program: Program, options: Options) -> Sequence[str]:
    if options.buckets is not None:
        return options.buckets
    return ("length=1",) if _has_cache(program) else ()


def _has_cache(program: Program) -> bool:
    """Whether a cache was inserted, so that lengths are an input."""
    return LENGTHS in {row.target for row in program.bindings.ins}


def _contents(source: Model, program: Program, resolved: Resolved, records: Sequence[Record], lock: Lock) -> Contents:
    remarks = [remark.to_json() for record in records for remark in record.remarks]
    settings = {
        entry.key: {name: setting.value for name, setting in entry.options.items()} for entry in resolved.entries
    }
    tokenizer = source.tokenizer
    return Contents(
        model=source.name,
        architecture=program.facts.architecture,
        kind="decoder" if _has_cache(program) else "program",
        facts={name: fact.value for name, fact in program.facts.known()},
        texts={
            "matches.lock": lock.text(),
            "resolved.yaml": yaml.safe_dump({"transforms": settings}, sort_keys=False),
            "remarks.jsonl": "".join(json.dumps(remark, ensure_ascii=False) + "\n" for remark in remarks),
        },
        save_tokenizer=None if tokenizer is None else lambda folder: _save_tokenizer(tokenizer, folder),
    )


def _save_tokenizer(tokenizer: Callable[[], Any], folder: Path) -> None:
    """A model without a tokenizer is packed without one: token numbers go in and out."""
    try:
        save_tokenizer(tokenizer(), folder)
    except ModelError as error:
        folder.mkdir(exist_ok=True)
        (folder / "missing.txt").write_text(f"{error.problem}\n")


class _Clock:
    """How long stages take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, stage: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        result = stage()
        self.seconds[name] = time.perf_counter() - start
        return result

    def spent(self, *names: str) -> float:
        """How long these stages took together."""
        return sum(self.seconds[name] for name in names)
