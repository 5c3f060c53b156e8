"""Match a pattern tree at a node. On failure, report how much matched and the first difference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.call_arguments import COMMUTATIVE, normalize_args
from inlay.program.graphs import target_text
from inlay.rewrite.pattern_trees import PatternCall, PatternTree, PatternVariable
from inlay.rewrite.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class PatternMatch:
    """The node of each call of a pattern, and the value of each variable."""

    nodes: dict[PatternCall, fx.Node] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> PatternMatch:
        """Return a copy, to try another alternative from here."""
        return PatternMatch(dict(self.nodes), dict(self.values))


@dataclass(frozen=True)
class Mismatch:
    """The first difference of the attempt that matched most."""

    kind: Reason
    text: str
    node: fx.Node | None
    matched: int


class Matcher:
    """Matches one pattern, starting from a node that may be its output."""

    def __init__(self, tree: PatternTree, ignored_args: frozenset[str] = frozenset()) -> None:
        self.tree, self.ignored_args = tree, ignored_args
        self.best_mismatch = Mismatch(Reason.MISSING, "", None, -1)

    def match(self, root: fx.Node) -> PatternMatch | Mismatch:
        """Match the pattern's first output at `root`; further outputs are found from there."""
        self.best_mismatch = Mismatch(Reason.MISSING, "", None, -1)
        for found in self._match(self.tree.outputs[0], root, PatternMatch()):
            complete = self._other_outputs(found)
            if complete is not None and self._check_consumers(complete):
                return complete
        return self.best_mismatch

    def _record_mismatch(self, kind: Reason, text: str, node: Any, found: PatternMatch) -> None:
        if len(found.nodes) > self.best_mismatch.matched:
            self.best_mismatch = Mismatch(kind, text, node if isinstance(node, fx.Node) else None, len(found.nodes))

    def _match(self, pattern: Any, value: Any, found: PatternMatch) -> Iterator[PatternMatch]:
        """Yield every way in which `pattern` matches `value`, given what was matched before."""
        if isinstance(pattern, PatternVariable):
            yield from self._match_variable(pattern, value, found)
        elif isinstance(pattern, PatternCall):
            yield from self._match_call(pattern, value, found)
        elif isinstance(pattern, list):
            if not isinstance(value, (list, tuple)) or len(value) != len(pattern):
                self._record_mismatch(Reason.CONSTANT, f"{pattern} expected, {value} found", value, found)
                return
            yield from self._match_all(list(zip(pattern, value, strict=True)), found)
        elif is_same_constant(pattern, value):
            yield found
        else:
            self._record_mismatch(Reason.CONSTANT, f"{pattern} expected, {value} found", value, found)

    def _match_variable(self, pattern: PatternVariable, value: Any, found: PatternMatch) -> Iterator[PatternMatch]:
        if pattern.name in found.values:
            known = found.values[pattern.name]
            if known is value or is_same_constant(known, value):
                yield found
            else:
                self._record_mismatch(
                    Reason.MISSING, f"{pattern.name} is {known} in one place and {value} in another", value, found
                )
            return
        new = found.copy()
        new.values[pattern.name] = value
        yield new

    def _match_call(self, pattern: PatternCall, value: Any, found: PatternMatch) -> Iterator[PatternMatch]:
        if pattern in found.nodes:
            if found.nodes[pattern] is value:
                yield found
            else:
                self._record_mismatch(Reason.MISSING, f"{found.nodes[pattern]} expected, {value} found", value, found)
            return
        if not isinstance(value, fx.Node) or value.target is not pattern.target:
            text = target_text(value.target) if isinstance(value, fx.Node) else repr(value)
            self._record_mismatch(Reason.MISSING, f"{target_text(pattern.target)} expected, {text} found", value, found)
            return
        if value in found.nodes.values():
            self._record_mismatch(Reason.MISSING, f"{value} would match two nodes of the pattern", value, found)
            return
        new = found.copy()
        new.nodes[pattern] = value
        actual = dict(normalize_args(value))
        for arguments in argument_orders(pattern):
            pairs = [(expected, actual.get(name)) for name, expected in arguments if name not in self.ignored_args]
            yield from self._match_all(pairs, new)

    def _match_all(self, pairs: list[tuple[Any, Any]], found: PatternMatch) -> Iterator[PatternMatch]:
        if not pairs:
            yield found
            return
        (pattern, value), *rest = pairs
        for each in self._match(pattern, value, found):
            yield from self._match_all(rest, each)

    def _other_outputs(self, found: PatternMatch) -> PatternMatch | None:
        for output in self.tree.outputs[1:]:
            if output in found.nodes:
                continue
            candidates = {
                user
                for node in [*found.nodes.values(), *found.values.values()]
                if isinstance(node, fx.Node)
                for user in node.users
            }
            for node in sorted(candidates - set(found.nodes.values())):
                complete = next(self._match(output, node, found), None)
                if complete is not None:
                    found = complete
                    break
            else:
                return None
        return found

    def _check_consumers(self, found: PatternMatch) -> bool:
        """Check that no outside user and no argument of the replacement reads a value that will be removed."""
        inside = set(found.nodes.values())
        for name, value in found.values.items():
            if isinstance(value, fx.Node) and value in inside:
                self._record_mismatch(
                    Reason.ANOTHER_CONSUMER, f"{value} is both {name} and inside the pattern", value, found
                )
                return False
        outputs = {found.nodes[call] for call in self.tree.outputs}
        for node in inside - outputs:
            for user in node.users:
                if user not in inside:
                    self._record_mismatch(Reason.ANOTHER_CONSUMER, f"{node} is also read by {user}", node, found)
                    return False
        return True


def argument_orders(pattern: PatternCall) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Yield the arguments of a call in every equivalent order."""
    yield pattern.args
    swapped = COMMUTATIVE.get(pattern.target)
    values = dict(pattern.args)
    if swapped and all(name in values for name in swapped) and _has_unit_alpha(values):
        one, two = swapped
        yield tuple(
            (name, values[two] if name == one else values[one] if name == two else value)
            for name, value in pattern.args
        )


def _has_unit_alpha(values: dict[str, Any]) -> bool:
    """`add(a, b, alpha=2)` is not commutative."""
    return bool(values.get("alpha", 1) == 1)


def is_same_constant(one: Any, two: Any) -> bool:
    """Whether two arguments are the same constant: 1 and 1.0 are, 1 and True are not. A node equals only itself."""
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, (int, float)) and isinstance(two, (int, float)):
        return one == two
    if isinstance(one, torch.dtype) or isinstance(two, torch.dtype):
        return one is two
    if isinstance(one, _SYMBOLIC) or isinstance(two, _SYMBOLIC):
        return str(one) == str(two)  # their comparison would add a guard
    if isinstance(one, (list, tuple)) and type(one) is type(two):
        return len(one) == len(two) and all(map(is_same_constant, one, two))
    return type(one) is type(two) and one == two
