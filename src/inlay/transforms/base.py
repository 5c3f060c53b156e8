"""What a transform is, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from inlay.errors import ProgramError, TransformError, UsageError, suggest
from inlay.program.graphs import all_graphs
from inlay.program.symbols import fixed_symbols
from inlay.rewrite import Match, Reason, Refusal, Refused, Rewriter, Rule
from inlay.rewrite.pattern_search import find_matches, trace_alternatives
from inlay.rewrite.replacement import ReplacementCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import fx

    from inlay.program.program import Program
    from inlay.rewrite.rewriter import RewriteListener


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


class TransformOptions(BaseModel):
    """Options that every transform has. `expect` states how many sites there must be, as a number, as an expression of
    the model's facts (`2 * layers + 1`), or `any`, which needs a `reason`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    enabled: bool = True
    expect: int | str | None = None
    reason: str = ""


@dataclass
class TransformResult:
    """What a transform made of a program."""

    program: Program
    sites: int
    matched_roots: list[str] = field(default_factory=list)
    """Name of the first output of each site, as it was before."""
    misses: list[Refusal] = field(default_factory=list)
    has_site_count: bool = True
    """Whether `sites` are sites. Someone else's pass may give no count: then they are the calls that it changed."""
    notes: list[str] = field(default_factory=list)
    """What is worth knowing beside: they become remarks of the kind `analysis`."""


@dataclass(frozen=True)
class Case:
    """A small function and arguments that show where a transform fires, or why it must not."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    prerequisites: tuple[str, ...] = ()
    """Transforms that run first."""
    axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Axes of any size, by the function's own names of its arguments: `{"x": {0: "batch"}}`."""


class Transform(ABC):
    """Program → Program. Subclass `PatternTransform`, `LocalTransform` or `ProgramTransform`, decorate with
    `@transform`, and put the file into `library/`."""

    name: ClassVar[str] = ""
    stage: ClassVar[Stage]
    numerics: ClassVar[Numerics]
    anchors: ClassVar[tuple[str, ...]] = ()
    """Operators that show the transform has work: if one is there and no site matched, something is wrong."""
    adds_inputs: ClassVar[bool] = False
    """The result has inputs that the program did not have: no generic test can call both and compare, and the transform
    must be compared by a test of its own."""
    Options: ClassVar[type[TransformOptions]] = TransformOptions

    def __init__(self, options: Any = None) -> None:
        self.options: Any = options if options is not None else self.Options()
        self.site_filter: Callable[[fx.Node], bool] | None = None
        """Which sites to rewrite, told by their first output; None: all."""
        self.listeners: list[RewriteListener] = []
        """Who is told of every change to the graph."""

    def is_selected(self, output: fx.Node) -> bool:
        """Whether to rewrite the site that was just found: always, unless a bisection leaves some out."""
        return self.site_filter is None or self.site_filter(output)

    @classmethod
    def positive_cases(cls) -> list[Case]:
        """At least one place where the transform fires."""
        return []

    @classmethod
    def negative_cases(cls) -> list[Case]:
        """At least three places that look like it and must be left alone."""
        return []

    @abstractmethod
    def apply(self, program: Program) -> TransformResult:
        """Work on `program`, which is a copy, and hand it or another one on."""

    @classmethod
    def summary(cls) -> str:
        """The first line of its docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]


class ProgramTransform(Transform):
    """A transform that plans over the whole program, and then rewrites each match through the rewriter."""

    is_atomic: ClassVar[bool] = False
    """All matches are rewritten or none: one that is refused refuses all, and none is left out on its own."""

    @abstractmethod
    def plan(self, program: Program) -> Iterable[Match | Refusal]:
        """Every place to rewrite and every place to leave alone. The program stays as it is."""

    @abstractmethod
    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        """Rewrite one match. Raise `Refused` before anything was replaced to leave it alone after all."""

    def prepare(self, rewriter: Rewriter) -> None:
        """What is done to the program before it is planned over."""

    def clean_up(self, rewriter: Rewriter) -> None:
        """What is done after all matches were rewritten."""

    def notes(self, matches: Sequence[Match]) -> list[str]:
        """What is worth knowing about the matches that were rewritten."""
        return []

    def apply(self, program: Program) -> TransformResult:
        known = fixed_symbols(program.graph)
        applied = self._rewrite_all(program)
        now = fixed_symbols(program.graph)
        fixed = {name: value for name, value in now.items() if name in program.symbols or known.get(name) != value}
        if fixed:
            names = [
                f"{program.symbols[name].name if name in program.symbols else name} is {value}"
                for name, value in fixed.items()
            ]
            raise TransformError(
                f"{self.name} took it that {', '.join(names)}, and sizes may be others.",
                "Compare sizes with inlay.program.symbols.is_same_size, and let numbers be numbers.",
            )
        return applied

    def _rewrite_all(self, program: Program) -> TransformResult:
        before = program.copy() if self.is_atomic else program
        rewriter = Rewriter(program, self.listeners)
        applied, rewritten = TransformResult(program, 0), list[Match]()
        self.prepare(rewriter)
        rewriter.commit()
        for found in self._places(rewriter):
            if isinstance(found, Refusal):
                applied.misses.append(found)
            elif any(map(rewriter.is_erased, found.nodes)):
                size, text = len(found.nodes), "another match, which was rewritten before it"
                applied.misses.append(
                    Refusal(found.root, found.root, Reason.OVERLAP, text, size, size, is_mismatch=True)
                )
            elif self.is_atomic or self.is_selected(found.root):
                root = found.root.name
                try:
                    self.rewrite(found, rewriter)
                except Refused as refused:
                    if self.is_atomic:
                        return TransformResult(before, 0, misses=[*applied.misses, found.refusal(refused)])
                    rewriter.rollback()
                    applied.misses.append(found.refusal(refused))
                    continue
                rewriter.commit()
                applied.matched_roots.append(root)
                rewritten.append(found)
        try:
            if rewritten:
                self.clean_up(rewriter)
            applied.program, applied.sites = rewriter.finish(), len(rewritten)
        except ProgramError as error:
            if not self.is_atomic:
                raise
            last = rewritten[-1].refusal(Refused(Reason.SHAPE, error.problem))
            return TransformResult(before, 0, misses=[*applied.misses, last])
        applied.notes = self.notes(rewritten)
        return applied

    def _places(self, rewriter: Rewriter) -> Iterable[Match | Refusal]:
        return list(self.plan(rewriter.program))


class LocalTransform(ProgramTransform):
    """A transform that looks at one node at a time. It sees what it made of the nodes before."""

    @abstractmethod
    def match(self, node: fx.Node) -> Match | Refusal | None:
        """Whether a node is to be rewritten, or why not; None: it does not start like a match."""

    def plan(self, program: Program) -> Iterator[Match | Refusal]:
        """What is found in the program as it is; to `apply` it, each match is rewritten before the next node."""
        return self._places(Rewriter(program))

    def _places(self, rewriter: Rewriter) -> Iterator[Match | Refusal]:
        for _, graph in all_graphs(rewriter.program.graph):
            for node in list(graph.nodes):
                found = None if rewriter.is_erased(node) else self.match(node)
                if found is not None:
                    yield found


class PatternTransform(ProgramTransform, Rule):
    """A transform made of `pattern`, `check` and `replacement`."""

    def plan(self, program: Program) -> Iterator[Match | Refusal]:
        alternatives = trace_alternatives(program, self)
        replacements = ReplacementCache(program, self)
        for _, graph in all_graphs(program.graph):
            matches, refusals = find_matches(program, graph, self, alternatives, replacements)
            yield from refusals
            yield from matches

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        assert match.replacements is not None
        match.replacements.insert(match, rewriter)


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


def find_transform(name: str) -> type[Transform]:
    """The transform of this name."""
    known = registry()
    if name not in known:
        raise UsageError(f"There is no transform {name}.", suggest(name, known) or "`inlay passes` lists them.")
    return known[name]
