"""Lock files: matches and misses of every transform per model, compared with current results.

A lock file is meant for review. `check` reports each difference as a sentence.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

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
    """Matches and misses of one transform."""

    model_config = ConfigDict(extra="forbid")
    sites: int
    misses: dict[str, int] = Field(default_factory=dict)
    """Reason → count."""


class LockedModel(BaseModel):
    """One model: hashes of its program and configuration, and the results of each transform."""

    model_config = ConfigDict(extra="forbid")
    model: str
    architecture: str = ""
    nodes: int
    program: str
    configuration: str
    operators: dict[str, int] = Field(default_factory=dict)
    """Operator of the captured program → number of calls. Locks of watched programs and older locks have none."""
    transforms: dict[str, LockedTransform]


class LockOptions(BaseModel):
    """The options that a lock was written with. A check uses the same options."""

    model_config = ConfigDict(extra="forbid")
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name of a configuration file as given → its contents."""
    settings: list[str] = Field(default_factory=list)
    dtype: str = ""
    at: str = "captured"
    """Which program of each model was locked."""

    @classmethod
    def from_files(
        cls, files: Sequence[Path], settings: Sequence[str], dtype: str, at: str = "captured"
    ) -> LockOptions:
        """Return options with the current contents of the files."""
        kept = [ConfigFile.from_file(file) for file in files]
        return cls(config={each.origin: each.contents for each in kept}, settings=list(settings), dtype=dtype, at=at)

    @property
    def files(self) -> list[ConfigFile]:
        """The configuration files with their locked contents."""
        return [ConfigFile(name, contents) for name, contents in self.config.items()]

    def arguments(self) -> list[str]:
        """Return the options as command-line arguments."""
        words = [word for name in self.config for word in ("--config", name)]
        words += [word for each in self.settings for word in ("--set", each)]
        words += ["--at", self.at] if self.at != "captured" else []
        return words + (["--dtype", self.dtype] if self.dtype else [])

    def changes(self) -> Iterator[LockDifference]:
        """Find configuration files that changed since they were locked."""
        for name, contents in self.config.items():
            if not Path(name).exists():
                yield LockDifference(name, "The file is missing; its locked contents are used.", fails=False)
            elif ConfigFile.from_file(name).contents != contents:
                yield LockDifference(name, "The file changed since it was locked; its locked contents are used.")


class Lock(BaseModel):
    """A lock file."""

    model_config = ConfigDict(extra="forbid")
    format: Literal[3] = FORMAT
    versions: dict[str, str] = Field(default_factory=dict)
    options: LockOptions = Field(default_factory=LockOptions)
    models: list[LockedModel]

    def text(self) -> str:
        """Return the contents of the lock file."""
        return _HEADER + yaml.safe_dump(self.model_dump(), sort_keys=False, width=120)

    def changes(self) -> Iterator[LockDifference]:
        """Find packages whose version changed since the lock was written."""
        now = versions()
        for name, old in self.versions.items():
            if now.get(name) != old:
                text = f"The lock was written with {name} {old}; {now.get(name, 'no version of it')} is installed."
                yield LockDifference(name, text, fails=False)


def versions() -> dict[str, str]:
    """Return versions of the packages that affect how a model is captured and matched."""
    return {name: found for name in _PACKAGES if (found := machine.package_version(name))}


def lock_model(
    name: str, program: Program, resolved: ResolvedConfig, records: Sequence[TransformRecord]
) -> LockedModel:
    """Return the entry of one model, from its captured program and the records of the transforms."""
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
        operators=dict(sorted(program.op_counts().items())),
        configuration=_short_hash("\n".join(settings)),
        transforms={
            record.key: LockedTransform(sites=record.sites, misses=_count_reasons(record))
            for record in records
            if record.was_applied
        },
    )


def _count_reasons(record: TransformRecord) -> dict[str, int]:
    return dict(sorted(Counter(Reason.parse(remark.reason)[0].value for remark in record.misses).items()))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_lock(file: Path) -> Lock:
    """Read a lock file."""
    try:
        return Lock.model_validate(yaml.safe_load(file.read_text()))
    except OSError as error:
        raise UsageError(f"{file} cannot be read.", "Write one with `inlay lock MODEL -o matches.lock`.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not a lock of format {FORMAT}.", "Write it again with `inlay lock`.") from error


@dataclass(frozen=True)
class LockDifference:
    """One difference from a lock. It fails the check unless `fails` is false."""

    model: str
    """The model, the configuration file or the package."""
    message: str
    fails: bool = True
    transform: str = ""

    def annotation(self, file: Path) -> str:
        """Return the message as a GitHub Actions annotation."""
        level, title = "error" if self.fails else "notice", _escape(f"inlay check: {self.model}", ":,")
        return f"::{level} file={_escape(str(file), ':,')},title={title}::{_escape(self.message)}"


def _escape(text: str, also: str = "") -> str:
    """Return a text as a part of a workflow command of GitHub: without line ends, and other separators escaped."""
    for each in f"%\r\n{also}":
        text = text.replace(each, f"%{ord(each):02X}")
    return text


@dataclass
class Comparison:
    """The result of a check."""

    differences: list[LockDifference] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether no difference is a failure."""
        return not any(each.fails for each in self.differences)

    def to_json(self) -> dict[str, Any]:
        """Output JSON."""
        return {"holds": self.holds, "differences": [vars(each) for each in self.differences]}


def compare(old: LockedModel, new: LockedModel, explain: Callable[[str], str]) -> Iterator[LockDifference]:
    """Find what changed for one model, most important first. `explain` returns why a transform missed sites."""
    for key in dict.fromkeys((*old.transforms, *new.transforms)):
        before, after = _row(old, key), _row(new, key)
        if before is None or after is None:
            what = "did not run when the lock was written" if before is None else "does not run any more"
            yield LockDifference(old.model, f"{key} {what}.", transform=key)
        elif before.sites != after.sites:
            reason = f": {text}" if after.sites < before.sites and (text := explain(key)) else ""
            yield LockDifference(
                old.model, f"{key} matched {after.sites} sites, the lock has {before.sites}{reason}.", transform=key
            )
        elif before.misses != after.misses:
            yield LockDifference(
                old.model, f"{key}: reasons of misses changed from {_reasons(before)} to {_reasons(after)}.", False, key
            )
    if old.configuration != new.configuration:
        yield LockDifference(old.model, "The configuration changed.", fails=False)
    if old.program != new.program:
        nodes = f"{new.nodes} nodes" if new.nodes == old.nodes else f"{new.nodes} nodes instead of {old.nodes}"
        yield LockDifference(old.model, f"The captured program changed ({nodes}){_operators(old, new)}.", fails=False)


def _operators(old: LockedModel, new: LockedModel, shown: int = 8) -> str:
    """Return which operators are called more or less often, largest change first; nothing for a lock without them."""
    if not old.operators:
        return ""
    change = Counter(new.operators)
    change.subtract(old.operators)
    found = sorted((name for name, count in change.items() if count), key=lambda name: (-abs(change[name]), name))
    texts = [f"{name} {old.operators.get(name, 0)} → {new.operators.get(name, 0)}" for name in found[:shown]]
    more = f" and {len(found) - shown} more" if len(found) > shown else ""
    return f": calls of {', '.join(texts)}{more}" if texts else ": the same operators, connected or called differently"


def _row(locked: LockedModel, key: str) -> LockedTransform | None:
    """Return the results of a transform; of a part of it (`transform: part`) that is not there, none."""
    found = locked.transforms.get(key)
    return LockedTransform(sites=0) if found is None and key.partition(": ")[0] in locked.transforms else found


def _reasons(locked: LockedTransform) -> str:
    return ", ".join(f"{reason} × {count}" for reason, count in locked.misses.items()) or "none"
