"""Layers of configuration: default, overlays for a model, files, single settings. Later layers override keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inlay.errors import UsageError, one_line, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class _Match(BaseModel):
    model_config = ConfigDict(extra="forbid")
    architecture: list[str] = Field(default_factory=list)
    model: list[str] = Field(default_factory=list)


class _ConfigLayer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    match: _Match | None = None
    aliases: dict[str, str] = Field(default_factory=dict)
    transforms: dict[str, dict[str, Any] | None] = Field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A value and the layer it came from."""

    value: Any
    origin: str


@dataclass(frozen=True)
class TransformEntry:
    """One transform of the configuration, in order; `key` is its name, with `#2` for a second use."""

    key: str
    options: dict[str, Setting]

    @property
    def name(self) -> str:
        """The name of the transform."""
        return self.key.partition("#")[0]


@dataclass(frozen=True)
class ResolvedConfig:
    """The configuration of one build."""

    entries: tuple[TransformEntry, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    """Alias → key of an entry, or name of a transform that is not configured."""


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file with its contents."""

    origin: str
    contents: dict[str, Any]

    @classmethod
    def from_file(cls, file: Path | str) -> ConfigFile:
        """Read and validate a file."""
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"The configuration {file} cannot be read: {one_line(error)}.") from error
        contents = _parse_yaml(text, str(file))
        _validate(contents, str(file))
        return cls(str(file), contents)


def resolve_config(
    *,
    architecture: str = "",
    model: str = "",
    files: Sequence[Path | str | ConfigFile] = (),
    settings: Sequence[str] = (),
) -> ResolvedConfig:
    """Merge the layers into one configuration.

    >>> entries = {entry.key: entry for entry in resolve_config(settings=["match_rope.enabled=false"]).entries}
    >>> entries["match_rope"].options["enabled"]
    Setting(value=False, origin='--set match_rope.enabled=false')
    """
    options: dict[str, dict[str, Setting]] = {}
    aliases: dict[str, str] = {}
    for origin, layer in _layers(architecture, model, files):
        aliases.update(layer.aliases)
        _check_aliases(origin, layer.aliases, options)
        for key, values in layer.transforms.items():
            place = options.setdefault(_resolve_alias(key, aliases), {})
            place.update({name: Setting(value, origin) for name, value in (values or {}).items()})
    for text in settings:
        key, name, value = _parse_setting(text, options, aliases)
        options.setdefault(key, {})[name] = Setting(value, f"--set {text}")
    entries = tuple(TransformEntry(key, values) for key, values in options.items())
    return ResolvedConfig(entries, {alias: _resolve_alias(alias, aliases) for alias in aliases})


def _check_aliases(origin: str, aliases: dict[str, str], options: Iterable[str]) -> None:
    for alias in aliases:
        if alias.partition("#")[0] in {key.partition("#")[0] for key in options}:
            problem = f"{origin}: {alias} is a configured transform and cannot be an alias of {aliases[alias]}."
            raise UsageError(problem, "Choose another name.")


def _resolve_alias(key: str, aliases: dict[str, str]) -> str:
    """Return the key that an alias, an alias of an alias, or `alias#2` stands for."""
    seen: list[str] = []
    while key not in seen:
        seen.append(key)
        name, mark, number = key.partition("#")
        key = aliases.get(key, aliases.get(name, name).partition("#")[0] + mark + number)
    if key != seen[-1] or aliases.keys() & {key, key.partition("#")[0]}:
        raise UsageError(f"The aliases form a cycle: {' → '.join([*seen, key])}.", "Remove one of them.")
    return key


def _layers(
    architecture: str, model: str, files: Iterable[Path | str | ConfigFile]
) -> Iterator[tuple[str, _ConfigLayer]]:
    yield "default.yaml", _default_layer()
    for origin, layer in _overlays():
        if layer.match is not None and _applies(layer.match, architecture, model):
            yield origin, layer
    for file in files:
        kept = file if isinstance(file, ConfigFile) else ConfigFile.from_file(file)
        yield kept.origin, _validate(kept.contents, kept.origin)


def _default_layer() -> _ConfigLayer:
    text = resources.files("inlay.config").joinpath("default.yaml").read_text()
    return _validate(_parse_yaml(text, "default.yaml"), "default.yaml")


@cache
def default_aliases() -> dict[str, str]:
    """Return the aliases that Inlay defines: alias → name of the transform."""
    return _default_layer().aliases


def _overlays() -> Iterator[tuple[str, _ConfigLayer]]:
    folder = resources.files("inlay.config").joinpath("models")
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.name.endswith(".yaml"):
            origin = f"models/{each.name}"
            yield origin, _validate(_parse_yaml(each.read_text(), origin), origin)


def _applies(match: _Match, architecture: str, model: str) -> bool:
    return architecture in match.architecture or any(fnmatch(model, pattern) for pattern in match.model)


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UsageError(f"{origin} is not YAML{where}: {getattr(error, 'problem', None) or error}.") from error


def _validate(contents: Any, origin: str) -> _ConfigLayer:
    try:
        return _ConfigLayer.model_validate(contents)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        hint = suggest(str(first["loc"][-1]), _ConfigLayer.model_fields) if first["type"] == "extra_forbidden" else ""
        raise UsageError(f"{origin}: {key}: {first['msg'].lower()}.", hint) from error


def _parse_setting(text: str, known: dict[str, Any], aliases: dict[str, str]) -> tuple[str, str, Any]:
    path, equals, value = text.partition("=")
    key, dot, name = path.strip().rpartition(".")
    key = _resolve_alias(key, aliases)
    if not equals or not dot:
        raise UsageError(f"{text!r} is not a setting.", "Write --set TRANSFORM.OPTION=VALUE.")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {text}: {value!r} is not a YAML value.") from error
    if key not in known and (name, parsed) != ("enabled", True):  # a registered transform may be added
        raise UsageError(f"--set {text}: the configuration has no transform {key}.", suggest(key, known))
    return key, name, parsed


def find_overlays(name: str) -> dict[str, dict[str, Any]]:
    """Return the model overlays that configure a transform, with their options.

    >>> list(find_overlays("match_geglu"))[0]
    'models/gemma.yaml'
    """
    found: dict[str, dict[str, Any]] = {}
    for origin, layer in _overlays():
        for key, values in layer.transforms.items():
            if _resolve_alias(key, default_aliases() | layer.aliases).partition("#")[0] == name:
                found.setdefault(origin, {}).update(values or {})
    return found
