"""Find the matches of a rule, resolve overlaps, and collect every refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.errors import one_line
from inlay.program.graphs import all_graphs, is_mutation
from inlay.program.symbols import symbolic_sizes
from inlay.rewrite.matcher import Matcher, PatternMatch
from inlay.rewrite.pattern_cache import PATTERNS
from inlay.rewrite.reasons import Reason
from inlay.rewrite.replacement import ReplacementCache, arguments, insertion_point
from inlay.rewrite.rewriter import type_text
from inlay.rewrite.rule import Alternative, Match, Refusal, Refused, Rule

if TYPE_CHECKING:
    from inlay.program.program import Program

_MIN_MATCHED_SHARE = 0.5


def is_trivial(matched: int, pattern_nodes: int) -> bool:
    """Return whether too little of a pattern matched to report a miss: one node, or less than half.

    >>> is_trivial(1, 2), is_trivial(2, 2), is_trivial(2, 6), is_trivial(3, 6)
    (True, False, True, False)
    """
    return matched < max(2, pattern_nodes * _MIN_MATCHED_SHARE)


def trace_alternatives(program: Program, *rules: Rule) -> list[Alternative]:
    """Trace every pattern of the rules, in every dtype that the program uses, together."""
    dtypes = {
        value.dtype
        for _, graph in all_graphs(program.graph)
        for node in graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_floating_point()
    }
    found = [each for rule in rules for each in rule.alternatives(dtypes)]
    PATTERNS.trace((each.function, each.example) for each in found)
    return found


def find_matches(
    program: Program,
    graph: fx.Graph,
    rule: Rule,
    alternatives: list[Alternative],
    replacements: ReplacementCache | None = None,
) -> tuple[list[Match], list[Refusal]]:
    """Return the matches of one graph that may be rewritten together, in order, and every refusal."""
    found, refusals = _search(program, graph, rule, alternatives, replacements or ReplacementCache(program, rule))
    claimed: dict[fx.Node, Match] = {}
    accepted: list[Match] = []
    for match in found:
        other = next((claimed[node] for node in match.nodes if node in claimed), None)
        if other is not None:
            size, text = len(match.nodes), f"the site at {other.root}"
            refusals.append(Refusal(match.root, match.root, Reason.OVERLAP, text, size, size, is_mismatch=True))
            continue
        claimed.update(dict.fromkeys(match.nodes, match))
        accepted.append(match)
    return sorted(accepted, key=lambda match: match.nodes[-1]), refusals


def _search(
    program: Program, graph: fx.Graph, rule: Rule, alternatives: list[Alternative], replacements: ReplacementCache
) -> tuple[list[Match], list[Refusal]]:
    order = {node: index for index, node in enumerate(graph.nodes)}
    writes = [node for node in order if is_mutation(node)]
    matches: dict[fx.Node, Match] = {}
    refusals: dict[fx.Node, Refusal] = {}
    for alternative in alternatives:
        tree = PATTERNS.get(alternative.function, alternative.example)
        matcher = Matcher(tree, rule.ignored_args)
        for root in graph.nodes:
            if root.target is not tree.outputs[0].target:  # shortcut
                continue
            if root in matches:
                continue
            result = matcher.match(root)
            if isinstance(result, PatternMatch):
                nodes = tuple(sorted(result.nodes.values(), key=order.__getitem__))
                outputs = tuple(result.nodes[call] for call in tree.outputs)
                match = Match(nodes, outputs, result.values, alternative, replacements)
                refusal = _check_match(match, alternative, replacements, order, writes)
                if refusal is None:
                    matches[root] = match
                    refusals.pop(root, None)
                    continue
            elif is_trivial(result.matched, tree.num_calls):
                continue
            else:
                size, node = tree.num_calls, result.node or root
                refusal = Refusal(root, node, result.kind, result.text, result.matched, size, is_mismatch=True)
            if root not in refusals or _rank(refusal) > _rank(refusals[root]):
                refusals[root] = refusal
    # Where two matches overlap, the one with more nodes wins, then the earlier one.
    ordered = sorted(matches.values(), key=lambda match: (-len(match.nodes), order[match.root]))
    return ordered, [refusal for root, refusal in refusals.items() if root not in matches]


def _rank(refusal: Refusal) -> tuple[bool, int]:
    return not refusal.is_mismatch, refusal.matched


def _check_match(
    match: Match,
    alternative: Alternative,
    replacements: ReplacementCache,
    order: dict[fx.Node, int],
    writes: list[fx.Node],
) -> Refusal | None:
    """Return why a match must be left alone, or None."""
    first, last = order[match.nodes[0]], order[match.nodes[-1]]
    try:
        for write in writes:
            between = first < order[write] < last
            match.require(not between, Reason.MUTATION, f"{write} writes in place inside the pattern", write)
        for name, held in match.values.items():
            expected = alternative.example.get(name)
            if isinstance(expected, torch.Tensor):
                match.require(isinstance(match.value(name), torch.Tensor), Reason.SHAPE, f"{name} is not a tensor")
            elif isinstance(expected, (int, float)):
                constant = not isinstance(held, fx.Node)
                match.require(constant, Reason.CONSTANT, f"{name} is computed, not a constant", match.node(name))
        insertion_point(match, [held for held in match.values.values() if isinstance(held, fx.Node)])
        _check_types(match, alternative)
        replacements.rule.check(match)
        replacements.check(match, alternative)
    except Refused as refused:
        return match.refusal(refused)
    return None


def _check_types(match: Match, alternative: Alternative) -> None:
    """Check that the pattern, computed on the inputs of the match, gives the types of the match."""
    try:
        with symbolic_sizes():
            made = tree_leaves(alternative.function(**arguments(match, alternative.example)))
    except Exception as error:
        raise Refused(Reason.SHAPE, f"the pattern cannot be computed here: {one_line(error)}") from error
    for node, value in zip(match.outputs, made, strict=True):
        held = node.meta["val"]
        kind = Reason.DTYPE if held.dtype != value.dtype else Reason.SHAPE
        same = type_text(held) == type_text(value)
        match.require(same, kind, f"the pattern gives {type_text(value)}, but {node} is {type_text(held)}", node)
