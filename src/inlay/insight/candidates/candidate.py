"""Fusion candidates of a program. Known regions come from transforms that replace several calls by one.

All such transforms run on a copy, enabled or not. The calls that each replaces are a region. The search for unknown
regions continues in the resulting program, so that no region is found twice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import fx

from inlay.config import resolve_config
from inlay.insight.candidates.advice import Advice, Support, advise
from inlay.insight.candidates.chains import find_chains
from inlay.insight.candidates.neighbours import find_attention_prologues, find_epilogues, find_shared_inputs
from inlay.insight.candidates.op_kinds import FUSIBLE, OpKind, is_kernel, numerical_risk, op_kind, op_name
from inlay.insight.candidates.pattern import format_pattern
from inlay.insight.candidates.region import PREFILL_ROWS, ConcreteSizes, FusionRegion, Savings, estimate_savings
from inlay.insight.findings import layer_of
from inlay.program.decoder import has_kv_cache
from inlay.program.fold import fold
from inlay.program.graphs import SOURCE, all_graphs, all_nodes, operands, target_text
from inlay.transforms import Stage, configure, registry
from inlay.transforms.base import Numerics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inlay.insight.candidates.measurement import Measurement
    from inlay.ops.catalog.source_tree import TreeEntry
    from inlay.program.program import Program
    from inlay.transforms import Transform, TransformResult


_STAGES = (Stage.CLEAN, Stage.CANONICALIZE, Stage.FUSE)
_FAMILIES = {
    OpKind.REDUCTION: "norm chain",
    OpKind.POINTWISE: "elementwise chain",
    OpKind.ROTATION: "elementwise chain",
    OpKind.STENCIL: "elementwise chain",
    OpKind.ATTENTION: "attention neighbours",
}


def find_known_regions(program: Program) -> tuple[Program, list[FusionRegion], dict[str, frozenset[str]]]:
    """Return the program with every known region replaced, the regions, and the calls that each new call replaces.

    The last is a mapping: name of a new call → names of the original calls.
    """
    regions: list[FusionRegion] = []
    stands_for: dict[str, frozenset[str]] = {}
    for step in _steps():
        applied = step.apply(program.copy())
        if not applied.sites:
            continue
        if step.stage is Stage.CLEAN:
            program = applied.program
            continue
        found = _regions(step, program, applied, stands_for)
        if found:
            program = applied.program
            regions += found
    return program, regions, stands_for


def _steps() -> Sequence[Transform]:
    """Return one instance of each transform in build order; those not in the configuration come last in their stage."""
    steps = [type(step.transform) for step in configure(resolve_config())]
    steps += [cls for cls in registry().values() if cls not in steps]
    order = list(Stage)
    wanted = [cls for cls in steps if cls.stage in _STAGES and not cls.adds_inputs]
    return [cls() for cls in sorted(dict.fromkeys(wanted), key=lambda cls: order.index(cls.stage))]


def _regions(
    step: Transform, before: Program, applied: TransformResult, stands_for: dict[str, frozenset[str]]
) -> list[FusionRegion]:
    """Return the calls that a transform replaced at each site; none unless it replaces several kernels by one."""
    old = {node.name: node for node in all_nodes(before.graph)}
    new = [node for node in all_nodes(applied.program.graph) if node.name not in old and is_kernel(node)]
    made = [node for node in new if op_kind(node) in _FAMILIES]
    if len(made) != len(applied.matched_roots) or len(new) != len(made):
        return []
    gone = old.keys() - {node.name for node in all_nodes(applied.program.graph)}
    order = {name: index for index, name in enumerate(old)}
    regions, claimed = [], set[fx.Node]()
    for place, node in zip(sorted(applied.matched_roots, key=order.__getitem__), made, strict=True):
        nodes = _site_nodes(old[place], gone, claimed)
        claimed.update(nodes)
        calls = frozenset[str]().union(*(stands_for.get(each.name, frozenset({each.name})) for each in nodes))
        stands_for[node.name] = calls
        inside = tuple(sorted(nodes, key=lambda each: order[each.name]))
        family = _FAMILIES[op_kind(node)]
        regions.append(FusionRegion(family, op_name(node), (op_name(node),), inside, calls, node, step.name))
    return [region for region in regions if len(region.kernels) > 1]


def _site_nodes(root: fx.Node, gone: set[str], claimed: set[fx.Node]) -> set[fx.Node]:
    """Return the output of a site and its removed producers that no earlier site claimed."""
    found, todo = set[fx.Node](), [root]
    while todo:
        node = todo.pop()
        if node not in found and node not in claimed and (node is root or node.name in gone):
            found.add(node)
            todo.extend(operands(node))
    return found


LAUNCH_BYTES = 64 << 10
"""Bytes that cost as much time as one kernel launch: 5 µs at 13 GB/s. `--measure` replaces this estimate by times."""
SIZES_TEXT = f"decode: batch 1, one row; prefill: batch 1, {PREFILL_ROWS} rows"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A repeated region with all its occurrences."""

    name: str
    regions: tuple[FusionRegion, ...]
    pattern: str
    savings: Savings
    """Over all occurrences, in addition to the savings of contained candidates."""
    advice: Advice
    dtype: str
    risk: Numerics
    """What a kernel for it can change in the results."""
    sharing: str = ""
    """Operands that occurrences share, such as `30 × 2 that share 2 operands`."""
    overlaps: tuple[str, ...] = ()
    measurement: Measurement | None = None

    @property
    def family(self) -> str:
        """The kind of candidate."""
        return self.regions[0].family

    @property
    def calls(self) -> frozenset[str]:
        """The names of all covered calls."""
        return frozenset[str]().union(*(region.calls for region in self.regions))

    @property
    def score(self) -> float:
        """The savings: measured seconds, or bytes with launches converted to bytes."""
        if self.measurement is not None:
            return self.measurement.savings
        return float(self.savings.decode + self.savings.launches * LAUNCH_BYTES)

    @property
    def order(self) -> tuple[Any, ...]:
        """The sorting key: savings in powers of four, then support, then numerical risk, then savings."""
        magnitude = math.floor(math.log(self.score, 4)) if self.score > 0 else -math.inf
        support, risk = list(Support).index(self.advice.support), list(Numerics).index(self.risk)
        return -magnitude, support, risk, -self.score, self.name

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as JSON data."""
        advice = self.advice
        return {
            "name": self.name,
            "family": self.family,
            "pattern": self.pattern,
            "occurrences": len(self.regions),
            "together": self.sharing,
            "saved": vars(self.savings),
            "measured": vars(self.measurement) if self.measurement else None,
            "lookup": advice.lookup,
            "evidence": advice.evidence,
            "kernels": [
                {"name": entry.name, "source": entry.source, "evidence": entry.evidence, "here": entry.is_available}
                for entry in advice.kernels
            ],
            "tree": [entry.to_json() for entry in advice.tree],
            "support": advice.support.value,
            "numerical_risk": self.risk.value,
            "recommendation": advice.recommendation.value,
            "strengths": advice.strengths,
            "weaknesses": advice.weaknesses,
            "risks": advice.risks,
            "overlaps": list(self.overlaps),
            "source": self.source,
        }

    @property
    def source(self) -> str:
        """The source line of the first occurrence in the model."""
        return next((str(node.meta[SOURCE]) for node in self.regions[0].nodes if node.meta.get(SOURCE)), "")


@dataclass
class CandidateSearch:
    """The candidates of one program, best first, and the programs that were searched."""

    program: Program
    canonical_program: Program
    """The program with every known region replaced."""
    candidates: list[Candidate] = field(default_factory=list)

    @property
    def total(self) -> Savings:
        """The combined savings; of two alternatives that share calls, only the better one counts."""
        wanted = [each.savings for each in self.candidates if not any("instead" in text for text in each.overlaps)]
        return sum(wanted, Savings(0, 0, 0))


def searched_text(program: Program, *, is_captured: bool = False) -> str:
    """Say which program was searched: reports and `inlay candidates` use the same words for the same program."""
    cache = "with" if has_kv_cache(program.bindings) else "without"
    return "the program as captured" if is_captured else f"the program after the transforms, {cache} a KV cache"


def find_candidates(
    program: Program, on_step: Callable[[str], None] = lambda step: None, entries: Sequence[TreeEntry] = ()
) -> CandidateSearch:
    """Return the repeated unfused regions of a program, best first. `entries` are existing kernels of source trees.

    >>> import torch
    >>> from inlay.testing import program_of
    >>> def twice(x, y):
    ...     return torch.tanh(torch.tanh(x / 30) * 30 @ y / 30) * 30 @ y
    >>> kernels = find_candidates(program_of(twice, [torch.ones(4, 4)] * 2)).candidates
    >>> [(each.name, len(each.regions)) for each in kernels]
    [('div_tanh_mul', 2)]
    """
    on_step("matching known regions")
    canonical, regions, stands_for = find_known_regions(program)
    on_step("searching for other regions")
    sizes = {"decode": ConcreteSizes(program, 1), "prefill": ConcreteSizes(program, PREFILL_ROWS)}
    for _, graph in all_graphs(canonical.graph):
        found = list(find_chains(graph, sizes["prefill"], stands_for))
        taken = {node for region in found for node in region.nodes}
        found += find_shared_inputs(graph)
        found += find_epilogues(graph, taken, stands_for)
        found += find_attention_prologues(graph, stands_for)
        regions += found
    layers = fold(canonical).layer_of
    groups: dict[Any, list[FusionRegion]] = defaultdict(list)
    for region in regions:
        groups[_kind(region)].append(region)
    made = [_candidate(group, sizes, layers, entries) for group in groups.values() if len(group) > 1]
    made = [each for each in made if each.savings.launches]
    return CandidateSearch(program, canonical, rank(_make_names_unique(made)))


def rank(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates, best first, with their overlaps."""
    ordered = sorted(candidates, key=lambda each: each.order)
    return [replace(each, overlaps=tuple(_overlaps(each, ordered))) for each in ordered]


def _kind(region: FusionRegion) -> Any:
    """Return a key that is equal for regions of the same candidate."""
    if region.replacement is not None:
        return region.replacement.target
    if region.family == "shared input":
        return region.name
    place = {node: index for index, node in enumerate(region.nodes)}
    wiring = tuple(
        (
            target_text(node.target),
            tuple(place.get(each, -1) for each in operands(node)),
            repr([arg for arg in node.args if isinstance(arg, (int, float, str))]),
        )
        for node in region.nodes
    )
    return region.name, wiring


def _candidate(
    group: list[FusionRegion], sizes: dict[str, ConcreteSizes], layers: dict[Any, int], entries: Sequence[TreeEntry]
) -> Candidate:
    usual = Counter(len(region.nodes) for region in group).most_common(1)[0][0]
    first = next(region for region in group if len(region.nodes) == usual)
    total = sum((estimate_savings(region, sizes) for region in group), Savings(0, 0, 0))
    value = first.kernels[0].meta["val"]
    value = value[0] if isinstance(value, (list, tuple)) else value
    dtype = str(value.dtype).removeprefix("torch.")
    together = _describe_sharing(group, layers)
    return Candidate(
        first.name,
        (first, *(each for each in group if each is not first)),
        format_pattern(first),
        total,
        advise(first, dtype, entries),
        dtype,
        registry()[first.transform].numerics if first.transform else numerical_risk(first.kernels),
        together,
    )


def _describe_sharing(group: list[FusionRegion], layers: dict[Any, int]) -> str:
    """Return how many occurrences of a layer share operands; empty unless all do equally."""
    if any(region.replacement is None for region in group):
        return ""
    shared: Counter[Any] = Counter()
    for region in group:
        assert region.replacement is not None
        rest = tuple(operands(region.replacement)[1:])
        if rest:
            shared[layer_of(region.replacement, lambda: layers), rest] += 1
    counts = set(shared.values())
    if len(counts) != 1 or counts == {1} or sum(shared.values()) != len(group):
        return ""
    return f"{len(shared)} × {counts.pop()} that share {len(next(iter(shared))[1])} operands"


def _make_names_unique(candidates: list[Candidate]) -> list[Candidate]:
    """Number repeated names in program order."""
    seen: Counter[str] = Counter()
    made = []
    for each in candidates:
        seen[each.name] += 1
        made.append(replace(each, name=f"{each.name}_v{seen[each.name]}") if seen[each.name] > 1 else each)
    return made


def _overlaps(candidate: Candidate, ordered: list[Candidate]) -> Iterable[str]:
    """Yield a text for each candidate that it contains or that it shares calls with."""
    mine, before = candidate.calls, True
    for other in ordered:
        if other is candidate:
            before = False
            continue
        common = mine & other.calls
        if not common:
            continue
        known = other.regions[0].replacement is not None
        inside = [region for region in other.regions if known and region.calls <= mine]
        if inside and len(mine) > len(frozenset().union(*(region.calls for region in inside))):
            times = f"{len(inside)} of {len(other.regions)}" if len(inside) < len(other.regions) else "all"
            yield f"contains {other.name} ({times}); its savings are additional"
        elif before and common != mine:
            fused = [node for region in candidate.regions for node in region.kernels if node.name in common]
            if any(op_kind(node) in FUSIBLE for node in fused):
                yield f"use instead of {other.name}: they share {len(common)} calls"
            else:
                yield f"shares {len(common)} calls with {other.name}; the savings add up"
