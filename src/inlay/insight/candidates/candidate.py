"""Candidates: repeated regions that could be one kernel each, what that would save, and who computes it already."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from inlay.insight.candidates.advice import Advice, advise
from inlay.insight.candidates.chains import chains
from inlay.insight.candidates.known import known_regions
from inlay.insight.candidates.neighbours import around_attention, epilogues, shared_inputs
from inlay.insight.candidates.pattern import pattern_text
from inlay.insight.candidates.region import PREFILL, Region, Saved, Sizes, saved
from inlay.insight.candidates.work import FUSIBLE, work_of
from inlay.insight.findings import layer_of
from inlay.program.fold import fold
from inlay.program.graphs import SOURCE, all_graphs, operands, target_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from inlay.insight.candidates.measure import Measured
    from inlay.program.program import Program

LAUNCH = 64 << 10
"""Bytes that cost as much as one more kernel: 5 µs at 13 GB/s. A run with `--measure` replaces it by times."""
SIZES = f"decode: batch 1, one row; prefill: batch 1, {PREFILL} rows"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A repeated region, everywhere it stands."""

    name: str
    regions: tuple[Region, ...]
    pattern: str
    saved: Saved
    """Over all occurrences, on top of what candidates that it contains save."""
    advice: Advice
    dtype: str
    together: str = ""
    """How occurrences belong together, such as `30 × 2 with the same cos and sin`."""
    overlaps: tuple[str, ...] = ()
    measured: Measured | None = None

    @property
    def family(self) -> str:
        """Which sort of candidate it is."""
        return self.regions[0].family

    @property
    def calls(self) -> frozenset[str]:
        """Every call of the program that it covers."""
        return frozenset[str]().union(*(region.calls for region in self.regions))

    @property
    def score(self) -> float:
        """What to order by: measured seconds, or bytes with launches turned into bytes."""
        if self.measured is not None:
            return self.measured.saved
        return float(self.saved.decode + self.saved.launches * LAUNCH)

    def to_json(self) -> dict[str, Any]:
        """The candidate for machines."""
        advice = self.advice
        return {
            "name": self.name,
            "family": self.family,
            "pattern": self.pattern,
            "occurrences": len(self.regions),
            "together": self.together,
            "saved": {"launches": self.saved.launches, "decode": self.saved.decode, "prefill": self.saved.prefill},
            "measured": self.measured.to_json() if self.measured else None,
            "lookup": advice.lookup,
            "evidence": advice.evidence,
            "kernels": [
                {"name": entry.name, "source": entry.source, "evidence": entry.evidence, "here": entry.here}
                for entry in advice.found
            ],
            "recommendation": advice.recommendation.value,
            "strengths": advice.strengths,
            "weaknesses": advice.weaknesses,
            "risks": advice.risks,
            "overlaps": list(self.overlaps),
            "source": self.source,
        }

    @property
    def source(self) -> str:
        """The model's line that the first occurrence comes from."""
        return next((str(node.meta[SOURCE]) for node in self.regions[0].nodes if node.meta.get(SOURCE)), "")


@dataclass
class Search:
    """Candidates of one program, best first, and what they were found in."""

    program: Program
    canonical: Program
    """The program with every known shape replaced."""
    candidates: list[Candidate] = field(default_factory=list)

    @property
    def total(self) -> Saved:
        """What all of them would save together; of two that share calls, the better one counts."""
        wanted = [each.saved for each in self.candidates if not any("instead" in text for text in each.overlaps)]
        return sum(wanted, Saved(0, 0, 0))


def find_candidates(program: Program, on_step: Callable[[str], None] = lambda step: None) -> Search:
    """Repeated unfused regions of a program, by what fusing them could save.

    >>> import torch
    >>> from inlay.testing import program_of
    >>> def twice(x, y):
    ...     return torch.tanh(torch.tanh(x / 30) * 30 @ y / 30) * 30 @ y
    >>> found = find_candidates(program_of(twice, [torch.ones(4, 4)] * 2)).candidates
    >>> [(each.name, len(each.regions)) for each in found]
    [('div_tanh_mul', 2)]
    """
    on_step("matching known shapes")
    canonical, regions, stands_for = known_regions(program)
    on_step("searching for others")
    sizes = {"decode": Sizes(program, 1), "prefill": Sizes(program, PREFILL)}
    for _, graph in all_graphs(canonical.graph):
        found = list(chains(graph, sizes["prefill"], stands_for))
        taken = {node for region in found for node in region.nodes}
        found += shared_inputs(graph)
        found += epilogues(graph, taken, stands_for)
        found += around_attention(graph, stands_for)
        regions += found
    layers = fold(canonical).layer_of
    groups: dict[Any, list[Region]] = defaultdict(list)
    for region in regions:
        groups[_kind(region)].append(region)
    made = [_candidate(group, sizes, layers) for group in groups.values() if len(group) > 1]
    made = [each for each in made if each.saved.launches]
    return Search(program, canonical, ranked(_named(made)))


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Best first, each told what it has in common with those before it."""
    ordered = sorted(candidates, key=lambda each: (-each.score, each.name))
    return [replace(each, overlaps=tuple(_overlaps(each, ordered))) for each in ordered]


def _kind(region: Region) -> Any:
    """What two regions have in common that are the same candidate."""
    if region.made is not None:
        return region.made.target
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


def _candidate(group: list[Region], sizes: dict[str, Sizes], layers: dict[Any, int]) -> Candidate:
    usual = Counter(len(region.nodes) for region in group).most_common(1)[0][0]
    first = next(region for region in group if len(region.nodes) == usual)
    total = sum((saved(region, sizes) for region in group), Saved(0, 0, 0))
    value = first.kernels[0].meta["val"]
    value = value[0] if isinstance(value, (list, tuple)) else value
    dtype = str(value.dtype).removeprefix("torch.")
    together = _together(group, layers)
    return Candidate(
        first.name,
        (first, *(each for each in group if each is not first)),
        pattern_text(first),
        total,
        advise(first, dtype),
        dtype,
        together,
    )


def _together(group: list[Region], layers: dict[Any, int]) -> str:
    """Occurrences of one layer that read the same values beside their own, if all do."""
    if any(region.made is None for region in group):
        return ""
    shared: Counter[Any] = Counter()
    for region in group:
        assert region.made is not None
        rest = tuple(operands(region.made)[1:])
        if rest:
            shared[layer_of(region.made, lambda: layers), rest] += 1
    counts = set(shared.values())
    if len(counts) != 1 or counts == {1} or sum(shared.values()) != len(group):
        return ""
    return f"{len(shared)} × {counts.pop()} that share {len(next(iter(shared))[1])} operands"


def _named(candidates: list[Candidate]) -> list[Candidate]:
    """Each with a name of its own, in program order."""
    seen: Counter[str] = Counter()
    made = []
    for each in candidates:
        seen[each.name] += 1
        made.append(replace(each, name=f"{each.name}_v{seen[each.name]}") if seen[each.name] > 1 else each)
    return made


def _overlaps(candidate: Candidate, ordered: list[Candidate]) -> Iterable[str]:
    """What it contains, and which better ones it shares calls with."""
    mine, before = candidate.calls, True
    for other in ordered:
        if other is candidate:
            before = False
            continue
        common = mine & other.calls
        if not common:
            continue
        known = other.regions[0].made is not None
        inside = [region for region in other.regions if known and region.calls <= mine]
        if inside and len(mine) > len(frozenset().union(*(region.calls for region in inside))):
            times = f"{len(inside)} of {len(other.regions)}" if len(inside) < len(other.regions) else "all"
            yield f"contains {other.name} ({times}); its saving comes on top of that"
        elif before and common != mine:
            fused = [node for region in candidate.regions for node in region.kernels if node.name in common]
            if any(work_of(node) in FUSIBLE for node in fused):
                yield f"instead of {other.name}, with which it shares {len(common)} calls"
            else:
                yield f"shares {len(common)} calls with {other.name}; the savings add up"
