"""Bisection: find the sites of transforms, or the combinations of sites, that make the results of a model wrong.

Each run applies a subset of the sites. Answers are stored, so that an interrupted bisection resumes and no subset is
run twice.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from inlay.errors import TransformError, UsageError
from inlay.insight.explanation import drop_contract
from inlay.insight.findings import layer_of
from inlay.program.bindings import Role
from inlay.program.fold import fold
from inlay.program.graphs import MODULE, SOURCE, all_nodes, origin
from inlay.transforms.pass_manager import run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from torch import fx

    from inlay.program.program import Program
    from inlay.transforms.pass_manager import TransformStep

    Oracle = Callable[[Program], bool]


@dataclass(frozen=True)
class Culprit:
    """A transform and the index of a site that makes the results wrong, in the order of matching."""

    transform: str
    site: int | None
    """None for a pass that does not report sites; it counts as one site."""
    root: str = ""
    """The name of the rewritten node, before the rewrite."""
    layer: int | None = None
    weights: tuple[str, ...] = ()
    """The parameters that are read nearest before the rewritten node, in its module."""
    source: str = ""
    """The model's source line."""

    @property
    def text(self) -> str:
        """The culprit as one sentence."""
        if self.site is None:
            return f"{self.transform} makes the results wrong."
        layer = f", layer {self.layer}" if self.layer is not None else ""
        weights = f", weights {', '.join(self.weights)}" if self.weights else ""
        source = f" ({self.source})" if self.source else ""
        return f"{self.transform}, site {self.site}: {self.root}{layer}{weights}{source}."


@dataclass(frozen=True)
class BisectResult:
    """Every group of sites that was found."""

    groups: tuple[tuple[Culprit, ...], ...]
    """Each group alone makes the results wrong; the sites of one group do so only together."""
    runs: int
    is_complete: bool = True
    """Whether the results are right without these sites. Otherwise more sites are wrong."""
    right_without: tuple[str, ...] = ()
    """If more sites are wrong: the transforms without which the results are right, if these are all."""

    @property
    def culprits(self) -> list[Culprit]:
        """The sites of all groups. The list is empty if nothing is wrong."""
        return [each for group in self.groups for each in group]

    @property
    def sentences(self) -> list[str]:
        """The result as text: each culprit, and how they are wrong."""
        lines = [each.text for each in self.culprits]
        if len(self.groups) == 1 and len(lines) > 1:
            lines.append("The results are wrong only with all of them.")
        elif len(self.groups) > 1:
            together = [" with ".join(str(each.root or each.transform) for each in group) for group in self.groups]
            lines.append(f"Several are wrong, each of these by itself: {'; '.join(together)}.")
        if not self.is_complete:
            lines.append("More sites are wrong; --all finds every one.")
            names = ", ".join(self.right_without)
            lines.append(f"Without {names} the results are right." if names else "Other transforms are wrong too.")
        return lines or ["Nothing is wrong."]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        rows = [vars(each) | {"group": number} for number, group in enumerate(self.groups) for each in group]
        return {**vars(self), "groups": len(self.groups), "culprits": rows}


@dataclass
class _SiteFilter:
    """Accepts the selected sites of one transform and records every site it was called with."""

    selection: Collection[str] | None
    """Selected sites, named by captured nodes so that other sites do not rename them; None selects all."""
    parameters: Mapping[str, str]
    """Name of each parameter in the program → its name in the model."""
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Site → name and provenance of its output node in this run."""
    times: Counter[str] = field(default_factory=Counter)

    def __call__(self, output: fx.Node) -> bool:
        name = origin(output)
        self.times[name] += 1
        site = name if self.times[name] == 1 else f"{name}#{self.times[name]}"
        source = str(output.meta.get(SOURCE, ""))
        self.outputs[site] = {"root": output.name, "weights": self._weights(output), "source": source}
        return self.includes(site)

    def _weights(self, output: fx.Node) -> tuple[str, ...]:
        """Return the parameters that are read nearest before a node, in its module."""
        found, seen, todo = dict[str, None](), {output}, [output]
        while todo:
            inputs = todo.pop().all_input_nodes
            if own := [self.parameters[each.name] for each in inputs if each.name in self.parameters]:
                found.update(dict.fromkeys(own))
            else:
                module = str(output.meta.get(MODULE, ""))
                near = [each for each in inputs if str(each.meta.get(MODULE, "")).startswith(module)]
                todo += [each for each in reversed(near) if each not in seen]
                seen.update(near)
        return tuple(found)

    def includes(self, site: str) -> bool:
        """Return whether a site is selected."""
        return self.selection is None or site in self.selection


@dataclass(frozen=True)
class _CachedRun:
    """The result of a transform that ran on some of its sites."""

    key: str
    site_filter: _SiteFilter
    result: Program
    sites: int

    def is_reusable(self, key: str, chosen: Collection[str] | None) -> bool:
        """Return whether this selection gives the same result for every site that was found."""
        taken = (
            self.site_filter.includes(site) == (chosen is None or site in chosen) for site in self.site_filter.outputs
        )
        return key == self.key and all(taken)


_SiteKey = tuple[str, str]
"""A transform and one of its sites; "" for a pass that does not report sites."""


@dataclass
class Bisection:
    """Finds bad sites with an oracle that returns True for a good program. `answers` can be saved and reused."""

    program: Program
    steps: Sequence[TransformStep]
    oracle: Oracle
    answers: dict[str, bool] = field(default_factory=dict)
    on_run: Callable[[str, bool], None] = lambda text, good: None
    runs: int = 0
    """Number of programs that the oracle evaluated."""

    def __post_init__(self) -> None:
        """Run all transforms once to list the sites; the oracle is not called."""
        self.steps = [step for step in self.steps if step.transform.options.enabled]
        self._last_run: list[_CachedRun] = []
        """Steps of the last run; the next run reuses their common prefix."""
        self.site_index: dict[_SiteKey, Culprit] = {}
        """Every possible culprit, in order, by the captured node of its site."""
        nodes = {node.name: node for node in all_nodes(self.program.graph)}
        blocks = cache(lambda: fold(self.program).layer_of)
        for each in self._run({step.key: None for step in self.steps}):
            key, sites = each.key, each.site_filter.outputs
            for number, (site, about) in enumerate(sites.items()):
                node = nodes.get(site.partition("#")[0])
                layer = layer_of(node, blocks) if node is not None else None
                self.site_index[key, site] = Culprit(key, number, layer=layer, **about)
            if each.sites and not sites:
                self.site_index[key, ""] = Culprit(key, None)

    @property
    def sites(self) -> list[Culprit]:
        """Every possible culprit, in order."""
        return list(self.site_index.values())

    def find_all(self, most: int | None = 3) -> BisectResult:
        """Find culprits, then others without the sites already found, up to `most` times."""
        rest, groups = list(self.site_index), list[tuple[Culprit, ...]]()
        while not self._is_good(rest):
            if most is not None and len(groups) == most:
                blamed = dict.fromkeys(each.transform for group in groups for each in group)
                suffices = self._is_good([unit for unit in self.site_index if unit[0] not in blamed])
                return BisectResult(tuple(groups), self.runs, False, tuple(blamed) if suffices else ())
            culprits = self._find_group(rest)
            groups.append(tuple(self.site_index[unit] for unit in culprits))
            rest = [unit for unit in rest if unit not in culprits]
        return BisectResult(tuple(groups), self.runs)

    def _find_group(self, rest: list[_SiteKey]) -> list[_SiteKey]:
        """Return one culprit, or those that are bad only in combination, in order.

        The shortest bad prefix of the sites ends with a culprit. If that culprit alone is good, the shortest prefix of
        the remaining sites that is bad together with it ends with the next one. A pair takes two binary searches.
        """
        if not self._is_good([]):
            problem = "The oracle rejects the model before any transform ran."
            raise UsageError(problem, "Use an oracle that accepts the model.")
        culprits: list[_SiteKey] = []
        kept: list[_SiteKey] = []
        while not culprits or self._is_good(kept):
            *rest, last = _shortest_prefix(rest, kept, self._is_bad)
            prepared = self._find_prerequisites(last, rest, kept)
            culprits = [last, *culprits]
            kept = [*kept, last, *prepared]
            rest = [unit for unit in rest if unit not in prepared]
        return culprits

    def is_good(self, sites: Collection[Culprit]) -> bool:
        """Return whether the program is good when only these sites are rewritten."""
        return self._is_good([unit for unit, culprit in self.site_index.items() if culprit in sites])

    def format_sites(self, sites: Collection[Culprit]) -> str:
        """Return a text for sites that is the same in every process.

        Ranges include both ends: `match_rope: 0-3, 7; clean_noops: all`.
        """
        parts: dict[str, list[int]] = {}
        for culprit in self.sites:
            if culprit in sites:
                numbers = parts.setdefault(culprit.transform, [])
                numbers += [] if culprit.site is None else [culprit.site]
        return "; ".join(f"{key}: {_ranges(numbers) or 'all'}" for key, numbers in parts.items())

    def _is_good(self, units: Sequence[_SiteKey]) -> bool:
        text = self.format_sites({self.site_index[unit] for unit in units})
        if text not in self.answers:
            self.runs += 1
            try:
                done = self._run(_by_transform(units))
                self.answers[text] = self.oracle(done[-1].result if done else self.program)
            except TransformError:  # a pass that requires an omitted site does not produce a bad program
                self.answers[text] = True
            self.on_run(text, self.answers[text])
        return self.answers[text]

    def _is_bad(self, units: Sequence[_SiteKey]) -> bool:
        return not self._is_good(units)

    def _find_prerequisites(self, unit: _SiteKey, rest: list[_SiteKey], kept: list[_SiteKey]) -> list[_SiteKey]:
        """Return the sites that this site requires to exist. They are not culprits. The oracle is not called."""
        needed: list[_SiteKey] = []
        while not self._is_found(unit, [*kept, *needed]):
            *rest, last = _shortest_prefix(rest, [*kept, *needed], partial(self._is_found, unit))
            needed.append(last)
        return needed

    def _is_found(self, unit: _SiteKey, others: Sequence[_SiteKey]) -> bool:
        key, site = unit
        try:
            done = {each.key: each for each in self._run(_by_transform([*others, unit]))}
        except TransformError:
            return False
        return site in done[key].site_filter.outputs if site else bool(done[key].sites)

    def _run(self, chosen: Mapping[str, Collection[str] | None]) -> list[_CachedRun]:
        """Apply only these sites; return the result of each transform."""
        asked = [step for step in self.steps if step.key in chosen]
        done: list[_CachedRun] = []
        for step, before in zip(asked, self._last_run, strict=False):
            if not before.is_reusable(step.key, chosen[step.key]):
                break
            done.append(before)
        for step in asked[len(done) :]:
            given, limited = done[-1].result if done else self.program, drop_contract(step)
            parameters = {row.name: row.target for row in given.bindings.with_role(Role.PARAMETER)}
            chooser = limited.transform.site_filter = _SiteFilter(chosen[step.key], parameters)
            made, (record,) = run(given, [limited])
            done.append(_CachedRun(step.key, chooser, made, record.sites))
        self._last_run = done
        return done


def _by_transform(units: Sequence[_SiteKey]) -> dict[str, Collection[str] | None]:
    chosen: dict[str, Collection[str] | None] = {}
    for key, site in units:
        chosen[key] = {*(chosen.get(key) or ()), site} if site else None
    return chosen


def _shortest_prefix(
    units: Sequence[_SiteKey], kept: Sequence[_SiteKey], holds: Callable[[Sequence[_SiteKey]], bool]
) -> Sequence[_SiteKey]:
    """Return the shortest prefix that `holds` with the `kept` units; all units hold, and the kept ones alone do not.

    >>> _shortest_prefix("abcdefg", "x", lambda some: {"c", "x"} <= set(some))
    'abc'
    """
    low, high = 0, len(units)
    while high - low > 1:
        middle = (low + high) // 2
        if holds([*units[:middle], *kept]):
            high = middle
        else:
            low = middle
    return units[:high]


def _ranges(numbers: Sequence[int]) -> str:
    """
    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    starts = [each for each in numbers if each - 1 not in numbers]
    ends = [each for each in numbers if each + 1 not in numbers]
    return ", ".join(str(one) if one == two else f"{one}-{two}" for one, two in zip(starts, ends, strict=True))


def load_answers(file: Path, key: str) -> dict[str, bool]:
    """Return the answers that `save_answers` wrote under this key; none if there is no file, or the key differs."""
    if not file.exists():
        return {}
    try:
        held = json.loads(file.read_text())
        return dict(held["answers"]) if held["key"] == key else {}
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{file} does not contain answers of a bisection.", "Name another file.") from error


def save_answers(file: Path, key: str, answers: Mapping[str, bool]) -> None:
    """Write answers. `key` identifies all that they depend on."""
    file.write_text(json.dumps({"key": key, "answers": answers}, indent=1))
