"""What a transform is, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from inlay.errors import UsageError, nearest
from inlay.rewrite import Miss, Rule, rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import fx

    from inlay.program.program import Program


class Stage(StrEnum):
    """The order of a build. Within a stage, the configuration's order counts."""

    CLEAN = "clean"
    CANONICALIZE = "canonicalize"
    SHARD = "shard"
    WEIGHTS = "weights"
    FUSE = "fuse"
    STATE = "state"
    SCHEDULE = "schedule"
    LOWER = "lower"


class Numerics(StrEnum):
    """What a transform may do to numbers: nothing, change rounding, or change results."""

    EXACT = "exact"
    ROUNDING = "rounding"
    APPROXIMATE = "approximate"


class Options(BaseModel):
    """Options that every transform has. `expect` states how many sites there must be, as a number, as an expression of
    the model's facts (`2 * layers + 1`), or `any`, which needs a `reason`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    enabled: bool = True
    expect: int | str | None = None
    reason: str = ""


@dataclass
class Applied:
    """What a transform made of a program."""

    program: Program
    sites: int
    places: list[str] = field(default_factory=list)
    """Name of the first output of each site, as it was before."""
    misses: list[Miss] = field(default_factory=list)
    counted: bool = True
    """Whether `sites` are sites. Someone else's pass may give no count: then they are the calls that it changed."""
    notes: list[str] = field(default_factory=list)
    """What is worth knowing beside: they become remarks of the kind `analysis`."""


@dataclass(frozen=True)
class Case:
    """A small function and arguments that show where a transform fires, or why it must not."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    after: tuple[str, ...] = ()
    """Transforms that run first."""
    axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Axes of any size, by the function's own names of its arguments: `{"x": {0: "batch"}}`."""


class Transform(ABC):
    """Program → Program. Subclass it, decorate with `@transform`, put the file into `library/`."""

    name: ClassVar[str] = ""
    stage: ClassVar[Stage]
    numerics: ClassVar[Numerics]
    anchors: ClassVar[tuple[str, ...]] = ()
    """Operators that show the transform has work: if one is there and no site matched, something is wrong."""
    adds_inputs: ClassVar[bool] = False
    """The result has inputs that the program did not have: no generic test can call both and compare, and the transform
    must be compared by a test of its own."""
    Options: ClassVar[type[Options]] = Options

    def __init__(self, options: Any = None) -> None:
        self.options = options if options is not None else self.Options()
        self.choose: Callable[[fx.Node], bool] | None = None
        """Which sites to rewrite, told by their first output; None: all."""

    def takes(self, output: fx.Node) -> bool:
        """Whether to rewrite the site that was just found: always, unless a bisection leaves some out."""
        return self.choose is None or self.choose(output)

    @classmethod
    def fires(cls) -> list[Case]:
        """At least one place where the transform fires."""
        return []

    @classmethod
    def leaves(cls) -> list[Case]:
        """At least three places that look like it and must be left alone."""
        return []

    @abstractmethod
    def apply(self, program: Program) -> Applied:
        """Work on `program`, which is a copy, and hand it or another one on."""

    @classmethod
    def summary(cls) -> str:
        """The first line of its docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]


class Rewrite(Transform, Rule):
    """A transform made of `pattern`, `check` and `replacement`."""

    def apply(self, program: Program) -> Applied:
        outcome = rewrite(program, self)
        places = [site.outputs[0].name for site in outcome.sites]
        return Applied(program, len(outcome.sites), places, outcome.misses)


_REGISTRY: dict[str, type[Transform]] = {}


def transform(
    name: str, *, stage: Stage, numerics: Numerics, anchors: tuple[str, ...] = ()
) -> Callable[[type[Transform]], type[Transform]]:
    """Register a transform under a name."""

    def register(cls: type[Transform]) -> type[Transform]:
        if name in _REGISTRY and _REGISTRY[name].__qualname__ != cls.__qualname__:
            raise UsageError(f"Two transforms are called {name}: {_REGISTRY[name].__module__} and {cls.__module__}.")
        cls.name, cls.stage, cls.numerics, cls.anchors = name, stage, numerics, anchors
        _REGISTRY[name] = cls
        return cls

    return register


def registry() -> Mapping[str, type[Transform]]:
    """All transforms: the library's and those of installed packages (entry points `inlay.transforms`)."""
    _load()
    return _REGISTRY


@cache
def _load() -> None:
    import inlay.transforms.library  # noqa: F401 - importing registers

    for point in entry_points(group="inlay.transforms"):
        point.load()


def find(name: str) -> type[Transform]:
    """The transform of this name."""
    known = registry()
    if name not in known:
        raise UsageError(f"There is no transform {name}.", nearest(name, known) or "`inlay passes` lists them.")
    return known[name]
