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

from inlay import machine
from inlay.config import ConfigFile
from inlay.errors import UsageError
from inlay.program.text.printer import dump
from inlay.rewrite import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inlay.config import ResolvedConfig
    from inlay.program.program import Program
    from inlay.transforms.pass_manager import TransformRecord

FORMAT: Literal[3] = 3
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


class LockOptions(BaseModel):
    """The options a lock was written with: a check uses them again."""

    model_config = ConfigDict(extra="forbid")
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Configuration file, as it was named → what it held."""
    settings: list[str] = Field(default_factory=list)
    dtype: str = ""

    @classmethod
    def from_files(cls, files: Sequence[Path], settings: Sequence[str], dtype: str) -> LockOptions:
        """The options of now."""
        kept = [ConfigFile.from_file(file) for file in files]
        return cls(config={each.origin: each.contents for each in kept}, settings=list(settings), dtype=dtype)

    @property
    def files(self) -> list[ConfigFile]:
        """The configuration files as they were."""
        return [ConfigFile(name, contents) for name, contents in self.config.items()]

    def arguments(self) -> list[str]:
        """The options as words of a command."""
        words = [word for name in self.config for word in ("--config", name)]
        words += [word for each in self.settings for word in ("--set", each)]
        return words + (["--dtype", self.dtype] if self.dtype else [])

    def changes(self) -> Iterator[LockDifference]:
        """The configuration files that are not any more what they were."""
        for name, contents in self.config.items():
            if not Path(name).exists():
                yield LockDifference(name, "The file is missing; its locked contents are used.", fails=False)
            elif ConfigFile.from_file(name).contents != contents:
                yield LockDifference(
                    name, "The file changed since it was locked; it is checked with what is locked of it."
                )


class Lock(BaseModel):
    """A lock file."""

    model_config = ConfigDict(extra="forbid")
    format: Literal[3] = FORMAT
    versions: dict[str, str] = Field(default_factory=dict)
    options: LockOptions = Field(default_factory=LockOptions)
    models: list[LockedModel]

    def text(self) -> str:
        """The file."""
        return _HEADER + yaml.safe_dump(self.model_dump(), sort_keys=False, width=120)


def versions() -> dict[str, str]:
    """What may change how a model is captured and matched."""
    return {name: found for name in _PACKAGES if (found := machine.package_version(name))}


def lock_model(
    name: str, program: Program, resolved: ResolvedConfig, records: Sequence[TransformRecord]
) -> LockedModel:
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
            record.key: LockedTransform(sites=record.sites, misses=dict(sorted(_miss_counts(record).items())))
            for record in records
            if record.status == "ran"
        },
    )


def _miss_counts(record: TransformRecord) -> Counter[str]:
    return Counter(Reason.parse(remark.reason)[0].value for remark in record.misses)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_lock(file: Path) -> Lock:
    """A lock from its file."""
    try:
        return Lock.model_validate(yaml.safe_load(file.read_text()))
    except OSError as error:
        raise UsageError(f"{file} cannot be read.", "Write one with `inlay lock MODEL -o matches.lock`.") from error
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not a lock of format {FORMAT}.", "Write it again with `inlay lock`.") from error


@dataclass(frozen=True)
class LockDifference:
    """One thing that is not as it was locked. What only informs is no failure."""

    model: str
    """The model, or the configuration file."""
    message: str
    fails: bool = True
    transform: str = ""

    def annotation(self, file: Path) -> str:
        """The same for GitHub Actions."""
        text = self.message.replace("%", "%25").replace("\n", "%0A")
        return f"::{'error' if self.fails else 'notice'} file={file},title=inlay check: {self.model}::{text}"


@dataclass
class Comparison:
    """What a check found."""

    differences: list[LockDifference] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether everything matches as often as it did."""
        return not any(each.fails for each in self.differences)

    def to_json(self) -> dict[str, Any]:
        """Output JSON."""
        return {"holds": self.holds, "differences": [vars(each) for each in self.differences]}


def compare(old: LockedModel, new: LockedModel, explain: Callable[[str], str]) -> Iterator[LockDifference]:
    """What changed for one model, most important first. `explain` says what a transform does not match."""
    for key in dict.fromkeys((*old.transforms, *new.transforms)):
        before, after = old.transforms.get(key), new.transforms.get(key)
        if before is None or after is None:
            what = "did not run when the lock was written" if before is None else "does not run any more"
            yield LockDifference(old.model, f"{key} {what}.", transform=key)
        elif before.sites != after.sites:
            reason = f": {text}" if (text := explain(key)) else ""
            yield LockDifference(
                old.model, f"{key} matched {after.sites} sites, and {before.sites} are locked{reason}.", transform=key
            )
        elif before.misses != after.misses:
            yield LockDifference(
                old.model, f"{key} misses for other reasons: {_reasons(after)}, not {_reasons(before)}.", False, key
            )
    if old.configuration != new.configuration:
        yield LockDifference(old.model, "The configuration is another one.", fails=False)
    if old.program != new.program:
        nodes = f"{new.nodes} nodes" if new.nodes == old.nodes else f"{new.nodes} nodes instead of {old.nodes}"
        yield LockDifference(old.model, f"The captured program is another one ({nodes}).", fails=False)


def _reasons(locked: LockedTransform) -> str:
    return ", ".join(f"{reason} × {count}" for reason, count in locked.misses.items()) or "none"
