"""Looks up earlier builds by their factors, and restores them without transforming or compiling.

An entry contains the results of transforms and compilation: code, the manifest, and the matches and misses of
transforms. Weights and tokenizer are not stored. They are read from the model, through the weight maps of the
manifest, as in `refit`.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from inlay import machine
from inlay.build_cache import key as factors
from inlay.build_cache.store import BuildCache, CacheEntry, DamagedEntryError
from inlay.errors import PackageError, one_line
from inlay.ops import weight_formats as _  # noqa: F401 - registers the weight maps of packed weights
from inlay.package import manifest as manifests
from inlay.package import store, weights_file
from inlay.package.writer import write_contents
from inlay.program.json_values import from_json
from inlay.transforms.pass_manager import TransformRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from inlay.package.manifest import Manifest
    from inlay.package.writer import Contents
    from inlay.program.program import Program

_PACKAGE, _VALUES = "package/", "values.safetensors"


@dataclass(frozen=True)
class FactorChange:
    """A factor that differs between two builds."""

    factor: str
    kind: str
    """`added`, `removed` or `changed`."""
    before: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        """A readable sentence; hashes are omitted.

        >>> FactorChange("source mine.py", "changed", "0" * 64, "1" * 64).text
        'source mine.py changed'
        >>> FactorChange("threads", "changed", "1", "2").text
        'threads changed from 1 to 2'
        """
        told = [value if len(value) < 64 else "" for value in (self.before, self.after)]
        if self.kind == "changed":
            return f"{self.factor} changed" + (f" from {told[0]} to {told[1]}" if all(told) else "")
        return f"{self.factor} {self.kind}"


@dataclass
class Lookup:
    """The result of a cache lookup, and the reason for a miss."""

    factors: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    hit: bool = False
    reason: str = ""
    """Why the cache or an entry was not used."""
    age: float = 0.0
    seconds_saved: float = 0.0
    """Seconds that the original build spent on the restored results."""
    nearest: str = ""
    nearest_model: str = ""
    differences: tuple[FactorChange, ...] = ()
    """Factors that differ from the nearest entry."""
    cache: BuildCache = field(default_factory=BuildCache, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        told = ("key", "hit", "reason", "age", "seconds_saved", "nearest", "nearest_model")
        found = {name: getattr(self, name) for name in told}
        return {**found, "differences": [asdict(each) for each in self.differences]}


@contextmanager
def lookup_build(
    get_request: Callable[[], factors.BuildRequest | str], model: str, on_step: Callable[[str], None]
) -> Iterator[Lookup]:
    """Look up a build in the cache. Without an entry, one process builds at a time and the others wait for it.

    `get_request` returns the build, or the reason not to use the cache.
    """
    found = Lookup()
    try:
        asked = get_request()
        if isinstance(asked, str):
            raise factors.NotCacheable(asked)
        found.factors = factors.collect_factors(asked)
        found.key = factors.compute_key(found.factors)
        machine.make_private_folder(found.cache.folder)
    except (factors.NotCacheable, OSError) as error:
        found.key, found.reason = "", one_line(error)
    if not found.key or (found.cache.folder / found.key).is_dir():
        yield found
        return
    with found.cache.lock_key(found.key, lambda: on_step("waiting for another process with the same build")):
        if not (found.cache.folder / found.key).is_dir():
            _explain(found, model)
        yield found


def _explain(found: Lookup, model: str) -> None:
    """Find the entry with the most common factors, preferably of the same model, and note the differences."""

    def alike(entry: CacheEntry) -> tuple[bool, int]:
        return entry.model == model, len(found.factors.items() & entry.factors.items())

    entry = max(found.cache.entries(), key=alike, default=None)
    if entry is not None:
        found.nearest, found.nearest_model = entry.key, entry.model
        found.age = time.time() - entry.created_at
        found.differences = tuple(_differences(entry.factors, found.factors))


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[FactorChange]:
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            yield FactorChange(name, "added" if name in after else "removed", before.get(name, ""), after.get(name, ""))
        elif before[name] != after[name]:
            yield FactorChange(name, "changed", before[name], after[name])


def restore_build(
    lookup: Lookup,
    path: Path,
    program: Program,
    contents: Callable[[Sequence[TransformRecord]], Contents],
    on_step: Callable[[str], None],
) -> tuple[Manifest, tuple[TransformRecord, ...]] | None:
    """Write the package from its entry, with weights of the captured program; return None if there is no entry.

    A damaged entry is removed and reported in `lookup.reason`; the build then continues as after a miss.
    """
    if not lookup.key:
        return None
    try:
        with lookup.cache.open_entry(lookup.key) as entry:
            if entry is None:
                return None
            on_step("restoring from the cache")
            records = tuple(from_json(TransformRecord, row) for row in entry.metadata["records"])
            manifest = _restore_package(entry, path, program, contents(records), on_step)
            entry.note_hit()
            lookup.hit, lookup.age, lookup.seconds_saved = True, time.time() - entry.created_at, entry.build_seconds
            return manifest, records
    except PackageError as error:
        lookup.reason = str(error)
        lookup.cache.drop(lookup.key)
        return None


def _restore_package(
    entry: CacheEntry, path: Path, program: Program, contents: Contents, on_step: Callable[[str], None]
) -> Manifest:
    draft = manifests.parse(json.dumps(entry.metadata["manifest"]))
    with store.stage_version(path) as folder:
        for name in entry.metadata["files"]:
            if name.startswith(_PACKAGE):
                entry.copy(name, folder / name.removeprefix(_PACKAGE))
        values = folder / _VALUES
        entry.copy(_VALUES, values)
        read = _reader(draft, program, weights_file.map_tensors(values, _weights_without_source(draft)))
        values.unlink()  # the mapping stays readable
        manifest = write_contents(draft, folder, contents, read, on_step)
        if manifest.weights_file != draft.weights_file:
            raise DamagedEntryError("The weights differ from those of the cached build.", "The entry was removed.")
        store.publish(path, folder, manifest.text())
    return manifest


def _weights_without_source(manifest: Manifest) -> dict[str, manifests.WeightRow]:
    """Return the weights that are not in a checkpoint."""
    return {name: row for name, row in manifest.weights.items() if not row.sources}


def _reader(draft: Manifest, program: Program, values: Mapping[str, torch.Tensor]) -> Callable[[str], torch.Tensor]:
    refs = {row.target: program.tensors[row.name] for row in program.bindings.ins if row.name in program.tensors}

    def read(name: str) -> torch.Tensor:
        row = draft.weights[name]
        if not row.sources:
            return values[name]
        missing = [source for source in row.sources if source not in refs]
        if missing:
            raise DamagedEntryError(f"{name} is derived from {missing[0]}, which the model does not have.")
        return row.derive(refs).read()

    return read


def store_build(
    lookup: Lookup, path: Path, manifest: Manifest, records: Sequence[TransformRecord], seconds: float
) -> None:
    """Store the result of a build in the cache. A failure does not fail the build."""
    if not lookup.key:
        return
    home = path / store.VERSIONS / manifests.version_hash(manifest.text().encode())
    about = {
        "model": manifest.model,
        "seconds": seconds,
        "factors": dict(lookup.factors),
        "manifest": json.loads(replace(manifest, files={}).text()),
        "records": [asdict(record) for record in records],
    }

    def write(folder: Path) -> None:
        for name, row in manifest.files.items():
            if name not in _REGENERATED_FILES and not name.startswith("tokenizer/"):
                target = folder / _PACKAGE / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((home / name).read_bytes())
                if manifests.sha256(target) != row.sha256:
                    raise OSError(f"{name} was changed after it was written")
        rows = _weights_without_source(manifest)
        given = weights_file.map_tensors(home / weights_file.NAME, rows)
        weights_file.write(folder / _VALUES, rows, given.__getitem__)

    try:
        if not lookup.cache.store(lookup.key, about, write):
            lookup.reason = "The result is larger than the cache limit. `inlay cache limit SIZE` changes the limit."
    except OSError as error:
        lookup.reason = f"The result could not be stored: {one_line(error)}."


_REGENERATED_FILES = ("matches.lock", "resolved.yaml", "remarks.jsonl")
"""Texts that every build writes from the records: they contain the model name of the request."""
