"""Lock: how often every transform matched, and why it did not elsewhere; held against what it does now.

A file that people read and review. `check` says what became different, in sentences.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inlay import host
from inlay.config import Kept
from inlay.errors import UsageError
from inlay.program.text import dump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inlay.config import Resolved
    from inlay.program.program import Program
    from inlay.transforms.pipeline import Record

FORMAT: Literal[2] = 2
_PACKAGES = ("inlay", "torch", "transformers")
_HEADER = "# Written by `inlay lock`; `inlay check --lock FILE` compares. Review changes of it like code.\n"


class LockedTransform(BaseModel):
    """What one transform did."""

    model_config = ConfigDict(extra="forbid")
    sites: int
    misses: dict[str, int] = Field(default_factory=dict)
    """Reason → how often."""


class LockedModel(BaseModel):
    """One model: what it was, under which configuration, and what each transform did to it."""

    model_config = ConfigDict(extra="forbid")
    model: str
    architecture: str = ""
    nodes: int
    program: str
    configuration: str
    transforms: dict[str, LockedTransform]


class Made(BaseModel):
    """The options a lock was written with: a check uses them again."""

    model_config = ConfigDict(extra="forbid")
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Configuration file, as it was named → what it held."""
    settings: list[str] = Field(default_factory=list)
    dtype: str = ""

    @classmethod
    def of(cls, files: Sequence[Path], settings: Sequence[str], dtype: str) -> Made:
        """The options of now."""
        kept = [Kept.of(file) for file in files]
        return cls(config={each.origin: each.contents for each in kept}, settings=list(settings), dtype=dtype)

    @property
    def files(self) -> list[Kept]:
        """The configuration files as they were."""
        return [Kept(name, contents) for name, contents in self.config.items()]

    def arguments(self) -> list[str]:
        """The options as words of a command."""
        words = [word for name in self.config for word in ("--config", name)]
        words += [word for each in self.settings for word in ("--set", each)]
        return words + (["--dtype", self.dtype] if self.dtype else [])

    def changes(self) -> Iterator[Difference]:
        """The configuration files that are not any more what they were."""
        for name, contents in self.config.items():
            if not Path(name).exists():
                yield Difference(name, "The file is not here; it is checked with what is locked of it.", fails=False)
            elif Kept.of(name).contents != contents:
                yield Difference(name, "The file changed since it was locked; it is checked with what is locked of it.")


class Lock(BaseModel):
    """A lock file."""

    model_config = ConfigDict(extra="forbid")
    format: Literal[2] = FORMAT
    versions: dict[str, str] = Field(default_factory=dict)
    made: Made = Field(default_factory=Made)
    models: list[LockedModel]

    def text(self) -> str:
        """The file."""
        return _HEADER + yaml.safe_dump(self.model_dump(), sort_keys=False, width=120)


def versions() -> dict[str, str]:
    """What may change how a model is captured and matched."""
    return {name: found for name in _PACKAGES if (found := host.version(name))}


def locked(name: str, program: Program, resolved: Resolved, records: Sequence[Record]) -> LockedModel:
    """The entry of one model, from the program as it was captured and what the transforms did."""
    settings = sorted(
        f"{entry.key}.{option}={setting.value}"
        for entry in resolved.entries
        for option, setting in entry.options.items()
    )
    return LockedModel(
        model=name,
        architecture=program.facts.architecture,
        nodes=len(program),
        program=_short_hash(dump(program).partition("\n")[2]),
        configuration=_short_hash("\n".join(settings)),
        transforms={
            record.key: LockedTransform(sites=record.sites, misses=dict(sorted(_kinds(record).items())))
            for record in records
            if record.status == "ran"
        },
    )


def _kinds(record: Record) -> Counter[str]:
    return Counter(remark.reason.partition(":")[0] for remark in record.misses)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_lock(file: Path) -> Lock:
    """A lock from its file."""
    try:
        return Lock.model_validate(yaml.safe_load(file.read_text()))
    except OSError as error:
        raise UsageError(f"{file} cannot be read.", "Write one with `inlay lock MODEL -o matches.lock`.") from error
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no lock of format {FORMAT}.", "Write it again with `inlay lock`.") from error


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was locked. What only informs is no failure."""

    model: str
    """The model, or the configuration file."""
    sentence: str
    fails: bool = True
    transform: str = ""

    def annotation(self, file: Path) -> str:
        """The same for GitHub Actions."""
        text = self.sentence.replace("%", "%25").replace("\n", "%0A")
        return f"::{'error' if self.fails else 'notice'} file={file},title=inlay check: {self.model}::{text}"


@dataclass
class Comparison:
    """What a check found."""

    differences: list[Difference] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether everything matches as often as it did."""
        return not any(each.fails for each in self.differences)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {"holds": self.holds, "differences": [vars(each) for each in self.differences]}


def compare(old: LockedModel, new: LockedModel, why: Callable[[str], str]) -> Iterator[Difference]:
    """What became different for one model, most important first. `why` says of a transform what it does not match."""
    for key in dict.fromkeys((*old.transforms, *new.transforms)):
        before, after = old.transforms.get(key), new.transforms.get(key)
        if before is None or after is None:
            what = "did not run when the lock was written" if before is None else "does not run any more"
            yield Difference(old.model, f"{key} {what}.", transform=key)
        elif before.sites != after.sites:
            reason = f": {text}" if (text := why(key)) else ""
            yield Difference(
                old.model, f"{key} matched {after.sites} sites, and {before.sites} are locked{reason}.", transform=key
            )
        elif before.misses != after.misses:
            yield Difference(
                old.model, f"{key} misses for other reasons: {_reasons(after)}, not {_reasons(before)}.", False, key
            )
    if old.configuration != new.configuration:
        yield Difference(old.model, "The configuration is another one.", fails=False)
    if old.program != new.program:
        nodes = f"{new.nodes} nodes" if new.nodes == old.nodes else f"{new.nodes} nodes instead of {old.nodes}"
        yield Difference(old.model, f"The captured program is another one ({nodes}).", fails=False)


def _reasons(locked: LockedTransform) -> str:
    return ", ".join(f"{reason} × {count}" for reason, count in locked.misses.items()) or "none"
