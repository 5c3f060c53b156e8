"""Base classes of transforms, and their registry."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from inlay.config import default_aliases
from inlay.errors import ProgramError, TransformError, UsageError, one_line, suggest
from inlay.program.graphs import all_graphs, target_text
from inlay.program.symbols import fixed_symbols
from inlay.rewrite import Match, Reason, Refusal, Refused, Rewriter, Rule
from inlay.rewrite.pattern_cache import PATTERNS
from inlay.rewrite.pattern_search import find_matches, trace_alternatives
from inlay.rewrite.pattern_trees import subtree_calls
from inlay.rewrite.replacement import ReplacementCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import fx

    from inlay.program.program import Program
    from inlay.rewrite.rewriter import RewriteListener


class Stage(StrEnum):
    """The ordered groups that transforms run in. Within a stage, they run in the order of the configuration."""

    CLEAN = "clean"
    CANONICALIZE = "canonicalize"
    SHARD = "shard"
    WEIGHTS = "weights"
    FUSE = "fuse"
    STATE = "state"
    SCHEDULE = "schedule"
    LOWER = "lower"


class Numerics(StrEnum):
    """Whether a transform keeps results exact, changes rounding, or changes results."""

    EXACT = "exact"
    ROUNDING = "rounding"
    APPROXIMATE = "approximate"


class TransformOptions(BaseModel):
    """Options of every transform. `expect` is the required number of sites: a number, an expression of the model's
    facts (`2 * layers + 1`), or `any`, which requires a `reason`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    enabled: bool = True
    expect: int | str | None = None
    reason: str = ""


@dataclass
class TransformResult:
    """The result of applying a transform to a program."""

    program: Program
    sites: int
    matched_roots: list[str] = field(default_factory=list)
    """Name of the first output of each site, before the rewrite."""
    misses: list[Refusal] = field(default_factory=list)
    has_site_count: bool = True
    """Whether `sites` counts sites. For an external pass that reports no count, it counts the calls that changed."""
    notes: list[str] = field(default_factory=list)
    """Further information; each note becomes a remark of the kind `analysis`."""


@dataclass(frozen=True)
class Case:
    """A small function with arguments, on which a transform must match or must not match."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    prerequisites: tuple[str, ...] = ()
    """Transforms that run first."""
    axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Dynamic axes, by argument name of the function: `{"x": {0: "batch"}}`."""


class Transform(ABC):
    """A pass from Program to Program. To add one, subclass `PatternTransform`, `LocalTransform` or `ProgramTransform`,
    decorate it with `@transform`, and put the file into `library/`."""

    name: ClassVar[str] = ""
    stage: ClassVar[Stage]
    numerics: ClassVar[Numerics]
    anchors: ClassVar[tuple[str, ...]] = ()
    """Operators that indicate sites. If a program has one of them and no site matched, the contract fails."""
    is_required: ClassVar[bool] = False
    """Whether a build fails if anchors are present and no site matched. Otherwise the build is only slower."""
    adds_inputs: ClassVar[bool] = False
    """Whether the result has inputs that the program did not have. Generic tests cannot call both and compare results,
    so such a transform needs a separate comparison test."""
    Options: ClassVar[type[TransformOptions]] = TransformOptions

    def __init__(self, options: Any = None) -> None:
        self.options: Any = options if options is not None else self.Options()
        self.site_filter: Callable[[fx.Node], bool] | None = None
        """Selects the sites to rewrite by their first output; None selects all."""
        self.listeners: list[RewriteListener] = []
        """Notified of every change to the graph."""

    def is_selected(self, output: fx.Node) -> bool:
        """Return whether to rewrite the site with this first output. Only a bisection excludes sites."""
        return self.site_filter is None or self.site_filter(output)

    @classmethod
    def positive_cases(cls) -> list[Case]:
        """Return at least one case that the transform must rewrite."""
        return []

    @classmethod
    def negative_cases(cls) -> list[Case]:
        """Return at least three similar cases that the transform must not rewrite."""
        return []

    @abstractmethod
    def apply(self, program: Program) -> TransformResult:
        """Transform `program`, which is a copy, and return it or another program in the result."""

    def skip_reason(self, program: Program) -> str:
        """Return why the transform has nothing to do in this program, or "". An anchor means that it has."""
        counts = program.op_counts()
        found = any(counts.get(name) for name in self.anchors)
        return f"the program has no {' or '.join(self.anchors)}" if self.anchors and not found else ""

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]


class ProgramTransform(Transform):
    """A transform that plans over the whole program, then rewrites each match through the rewriter."""

    is_atomic: ClassVar[bool] = False
    """Whether all matches are rewritten or none. One refused match refuses all, and a bisection excludes none."""

    @abstractmethod
    def plan(self, program: Program) -> Iterable[Match | Refusal]:
        """Return every match to rewrite and every refusal. The program must not be changed."""

    @abstractmethod
    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        """Rewrite one match. To refuse it after all, raise `Refused` before replacing anything."""

    def prepare(self, rewriter: Rewriter) -> None:
        """Change the program before `plan` runs."""

    def clean_up(self, rewriter: Rewriter) -> None:
        """Clean up after all matches were rewritten."""

    def notes(self, matches: Sequence[Match]) -> list[str]:
        """Return notes about the matches that were rewritten."""
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
                f"{self.name} assumed that {', '.join(names)}, but these sizes are dynamic.",
                "Compare sizes with inlay.program.symbols.is_same_size, which adds no guard.",
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
    """A transform that matches one node at a time, after the rewrites of earlier nodes."""

    @abstractmethod
    def match(self, node: fx.Node) -> Match | Refusal | None:
        """Return the match or the refusal at a node, or None if no match starts there."""

    def plan(self, program: Program) -> Iterator[Match | Refusal]:
        """Find matches in the unchanged program. `apply` instead rewrites each match before the next node."""
        return self._places(Rewriter(program))

    def _places(self, rewriter: Rewriter) -> Iterator[Match | Refusal]:
        for _, graph in all_graphs(rewriter.program.graph):
            for node in list(graph.nodes):
                found = None if rewriter.is_erased(node) else self.match(node)
                if found is not None:
                    yield found


class PatternTransform(ProgramTransform, Rule):
    """A transform that consists of `pattern`, `check` and `replacement`."""

    def plan(self, program: Program) -> Iterator[Match | Refusal]:
        alternatives = trace_alternatives(program, self)
        replacements = ReplacementCache(program, self)
        for _, graph in all_graphs(program.graph):
            matches, refusals = find_matches(program, graph, self, alternatives, replacements)
            yield from refusals
            yield from matches

    def skip_reason(self, program: Program) -> str:
        """Return one operator that the program lacks for each pattern, if every pattern calls one."""
        counts, lacking = program.op_counts(), list[set[str]]()
        for each in trace_alternatives(program, self):
            outputs = PATTERNS.get(each.function, each.example).outputs
            calls = {target_text(call.target) for output in outputs for call in subtree_calls(output)}
            lacking.append({name for name in calls if not counts.get(name)})
        if not all(lacking) or any(counts.get(name) for name in self.anchors):
            return ""
        if not lacking:
            return "the program has no floating-point values"
        times = Counter(name for each in lacking for name in each)
        named = {max(each, key=lambda name: (name in self.anchors, times[name], name)) for each in lacking}
        return f"the program has no {' or '.join(sorted(named))}"

    def trace_key(self) -> str:
        return repr(self.options.model_dump(exclude=set(TransformOptions.model_fields)))

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        assert match.replacements is not None
        match.replacements.insert(match, rewriter)


_REGISTRY: dict[str, type[Transform]] = {}


def transform(
    name: str, *, stage: Stage, numerics: Numerics, anchors: tuple[str, ...] = ()
) -> Callable[[type[Transform]], type[Transform]]:
    """Register a transform under a name."""

    def register(cls: type[Transform]) -> type[Transform]:
        if name in default_aliases():
            problem = f"{name} is an alias of {default_aliases()[name]} and cannot be the name of {cls.__qualname__}."
            raise UsageError(problem, "Choose another name.")
        if name in _REGISTRY and _REGISTRY[name].__qualname__ != cls.__qualname__:
            raise UsageError(f"Two transforms are called {name}: {_REGISTRY[name].__module__} and {cls.__module__}.")
        cls.name, cls.stage, cls.numerics, cls.anchors = name, stage, numerics, anchors
        _REGISTRY[name] = cls
        return cls

    return register


def registry() -> Mapping[str, type[Transform]]:
    """Return all transforms: the library's and those of installed packages (entry points `inlay.transforms`)."""
    _load()
    return _REGISTRY


@cache
def _load() -> None:
    import inlay.transforms.library  # noqa: F401 - importing registers

    for point in entry_points(group="inlay.transforms"):
        try:
            point.load()
        except Exception as error:  # a broken package must not stop the commands that do not need it
            package = point.dist.name if point.dist else point.module
            problem = f"{type(error).__name__}: {one_line(error)}"
            warnings.warn(f"The transforms of {package} ({point.value}) cannot be loaded: {problem}.", stacklevel=2)


def find_transform(name: str) -> type[Transform]:
    """Return the transform with this name or alias.

    >>> find_transform("fuse_norm").name
    'fuse_add_rms_norm'
    """
    known = registry()
    name = name if name in known else default_aliases().get(name, name)
    if name not in known:
        raise UsageError(f"There is no transform {name}.", suggest(name, known) or "`inlay passes` lists them.")
    return known[name]
