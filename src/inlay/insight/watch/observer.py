"""Observe the graph passes of this process.

Pattern passes: `PatternMatcherPass.apply`, which Inductor, vLLM and others call, and `SubgraphMatcher.match`, which
`torch.fx.replace_pattern` calls. Functions that edit a graph: what Inductor applies through `GraphTransformObserver`,
and `__call__` of the classes derived from its `CustomGraphPass`, which pass managers such as vLLM's call one by one.

While nothing is watched, all are the original functions. While something is, a pattern pass runs with copies of its
entries that report their matches. The near misses are searched in a copy of the graph, so what is compiled does not
change. An error in this never reaches the compilation: it is part of the record.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import threading
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from inlay.errors import one_line
from inlay.insight.watch.bisection import may_apply
from inlay.insight.watch.changes import compare_calls, describe_left, list_calls
from inlay.insight.watch.misses import ObservedPattern, find_findings
from inlay.insight.watch.records import MAX_RECORDS, PassRecord
from inlay.integrations.foreign_patterns import GraphAligner, InductorAligner, convert_graph, convert_pattern
from inlay.program.exported_program import select_meta
from inlay.program.graphs import SOURCE
from inlay.rewrite.differences import PatternDifference
from inlay.rewrite.partial_match import MAX_DIFFERENCES
from inlay.rewrite.pattern_trees import compile_id, custom_pass_classes, inductor
from inlay.rewrite.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from types import FrameType

    from torch import fx

_lock = threading.RLock()
_listeners: list[Callable[[PassRecord], None]] = []
_replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""Owner and name of each function that is observed now → the original, and what replaces it."""
_embedded: set[tuple[Any, str]] = set()
"""Observed functions that another library has wrapped, so that they could not be removed."""


class _ThreadState(threading.local):
    specific: Any = None
    """The shape-specific pattern of the check that runs."""
    effects: set[bool] | None = None
    """Whether the passes changed something that the function which runs has called; None outside of a function."""


_state = _ThreadState()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may hold it
_SKIPPED_CALLERS = (
    "torch.fx",
    "torch._inductor.pattern_matcher",
    "contextlib",
    "functools",
    "inlay.watch_startup",
    __name__,
)


@contextmanager
def watch_patterns() -> Iterator[list[PassRecord]]:
    """Record every graph pass that runs in this process within the context.

    `torch.compile` compiles when the function is first called, so the first call must be in the context. A graph from
    Inductor's cache is not compiled, and its passes do not run. At most `MAX_RECORDS` are kept; the last one has the
    number of those that were dropped.
    """
    records: list[PassRecord] = []

    def listener(record: PassRecord) -> None:
        with _lock:
            if len(records) < MAX_RECORDS:
                records.append(record)
            else:
                records[-1] = replace(records[-1], dropped=records[-1].dropped + 1)

    add_listener(listener)
    try:
        yield records
    finally:
        remove_listener(listener)


def add_listener(listener: Callable[[PassRecord], None]) -> None:
    """Call a function with the record of every pass, until it is removed."""
    with _lock:
        _listeners.append(listener)
        _replace_functions()


def remove_listener(listener: Callable[[PassRecord], None]) -> None:
    """Remove a listener; after the last one, the original functions are back."""
    with _lock:
        _listeners.remove(listener)
        if not _listeners:
            for (owner, name), (original, observed) in _replaced.items():
                if vars(owner)[name] is observed:
                    setattr(owner, name, original)
                elif vars(owner)[name] is not original:  # another library has wrapped it since, and goes on calling it
                    _embedded.add((owner, name))
            _replaced.clear()


def _replace_functions() -> None:
    """Replace what is observed. Classes of passes may be new whenever Inductor calls a pass."""
    with _lock:
        for key, observe in _observers().items() if _listeners else ():
            if key not in _replaced and key not in _embedded:
                original = vars(key[0])[key[1]]
                _replaced[key] = original, _observed_function(original, observe)
                setattr(*key, _replaced[key][1])


def _observers() -> dict[tuple[Any, str], Any]:
    """Return the functions to observe, by owner and name, and what is called with the original and its arguments."""
    passes = {(each, "__call__"): _observe_custom_pass for each in custom_pass_classes() if "__call__" in vars(each)}
    if (cache := getattr(inductor(), "_SpecificPatternCache", None)) is not None:  # torch 2.15
        passes[cache, "lookup"] = _observe_lookup
    return passes | {
        (inductor().PatternMatcherPass, "apply"): _observe_apply,
        (inductor(), "fx_to_pattern"): _observe_fx_to_pattern,
        (SubgraphMatcher, "match"): _observe_match,
        (GraphTransformObserver, "apply_graph_pass"): _observe_function,
        (GraphTransformObserver, "apply_gm_pass"): _observe_function,
    }


def _observed_function(original: Any, observe: Any) -> Any:
    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return observe(original, *args, **kwargs) if _listeners else original(*args, **kwargs)

    return observed


def _observe_fx_to_pattern(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Convert, and keep the result: it is the shape-specific pattern of a check that is running."""
    _state.specific = original(*args, **kwargs)
    return _state.specific


def _observe_lookup(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Look up the shape-specific pattern of a check, which is not converted again."""
    found = original(*args, **kwargs)
    _state.specific = found[0].get(found[1]) if found is not None else None
    return found


def _observe_apply(original: Any, watched: Any, gm: Any) -> Any:
    graph, call = getattr(gm, "graph", gm), _PassCall(_inductor_pass_name(watched))
    before = frozenset(getattr(graph, "nodes", ()))
    observed = call.protect(lambda: call.observed_pass(watched)) or watched
    matches = original(observed, gm)
    call.report(graph, matches, [node for node in graph.nodes if node not in before])
    return matches


def _observe_match(original: Any, matcher: SubgraphMatcher, graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
    found = original(matcher, graph, *args, **kwargs)
    frame = _caller()
    call = _PassCall(f"{_module(frame)}.{frame.f_code.co_name}")
    name = _replaced_pattern()
    applied = call.protect(lambda: [match for match in found if may_apply(call.name, name, _last_node(match))])
    found = found if applied is None else applied

    def observe() -> None:
        tree = convert_graph(matcher.pattern, matcher.ignore_literals)
        inner = {node for node in matcher.pattern.nodes if node.op not in ("placeholder", "output")}
        matches = [sorted(match.nodes_map[node] for node in inner if node in match.nodes_map) for match in found]
        call.patterns.append(ObservedPattern(name, tree, GraphAligner, matches))

    call.protect(observe)
    call.report(graph, len(found), {node for each in call.patterns for match in each.matches for node in match})
    return found


def _observe_function(original: Any, applied: GraphTransformObserver, pass_fn: Any) -> Any:
    """Observe a function that Inductor applies to a graph, unless it is observed where it is defined."""
    _replace_functions()
    observed = next(
        (now for each, now in _replaced.values() if getattr(pass_fn, "__func__", None) in (each, now)), None
    )
    if observed is not None:  # one that was bound before the watch holds the original
        return original(applied, MethodType(observed, pass_fn.__self__))
    if _is_observed(pass_fn, "__call__"):
        return original(applied, pass_fn)
    plain = _plain(pass_fn)
    module, own = str(getattr(plain, "__module__", "")), _function_name(plain) or type(plain).__name__
    name = applied.passname if module.startswith("torch.") else f"{module.rpartition('.')[2]}.{own}"
    return original(applied, lambda graph: _call_observed(name, pass_fn, graph))


def _is_observed(owner: Any, method: str) -> bool:
    """Return whether a method of an object is observed where its class or a base class defines it."""
    home = next((each for each in type(owner).__mro__ if method in vars(each)), None)
    return (home, method) in _replaced


def _observe_custom_pass(original: Any, watched: Any, /, *args: Any, **kwargs: Any) -> Any:
    name = str(getattr(watched, "pass_name", "") or type(watched).__name__)
    return _call_observed(name, functools.partial(original, watched), *args, **kwargs)


def _call_observed(name: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a graph or of its module, and report what it changed, unless the passes that it called did."""
    call = _PassCall(name)
    subject: Any = next(iter((*args, *kwargs.values())), None)
    before = call.protect(lambda: list_calls(subject))
    inner: set[bool] = set()
    outer, _state.effects = _state.effects, inner
    try:
        result = function(*args, **kwargs)
    finally:
        _state.effects = outer
        if outer is not None:
            outer |= inner
    changes = call.protect(lambda: compare_calls(before, list_calls(subject))) or {}
    left, counts = call.protect(lambda: describe_left(subject)) or ({}, {})
    if not inner or (changes and True not in inner):
        _tell(PassRecord(name, compile_id(), 0, 0, error=call.error, changes=changes, left=left, num_left=counts))
    return result


def _last_node(match: Any) -> fx.Node:
    return max(node for node in match.nodes_map.values() if isinstance(node, torch.fx.Node))


class _PassCall:
    """One call of a pass."""

    def __init__(self, name: str) -> None:
        self.name, self.error = name, ""
        self.patterns: list[ObservedPattern] = []

    def protect(self, function: Callable[[], Any]) -> Any:
        """Call a function. An error is kept for the record, and does not reach the compilation."""
        try:
            return function()
        except Exception as error:
            self.error = self.error or f"{type(error).__name__}: {one_line(error)}"
            return None

    def observed_pass(self, watched: Any) -> Any:
        """Return the pass with entries that report; the pass itself is not changed."""
        made, copies = copy.copy(watched), dict[int, Any]()
        made.patterns = defaultdict(list)
        for key, entries in watched.patterns.items():
            for entry in entries:
                if id(entry) not in copies:
                    copies[id(entry)] = self._observed_entry(entry)
                made.patterns[key].append(copies[id(entry)])
        return made

    def _observed_entry(self, entry: Any) -> Any:
        pattern = ObservedPattern(entry_name(entry), _converted(entry.pattern), InductorAligner)
        self.patterns.append(pattern)
        made = copy.copy(entry)

        def check(match: Any) -> Any:
            _state.specific = None
            is_accepted = entry.extra_check(match)
            if not isinstance(is_accepted, torch.SymBool) and not is_accepted:
                self.protect(lambda: pattern.refusals.append(_explain_refusal(entry, match)))
                return is_accepted
            is_allowed = self.protect(lambda: may_apply(self.name, pattern.name, match.output_node()))
            return False if is_allowed is False else is_accepted

        def apply(match: Any, graph: Any, node: Any) -> Any:
            pattern.matches.append([*match.nodes])
            return entry.apply(match, graph, node)

        made.extra_check, made.apply = check, apply
        return made

    def report(self, graph: fx.Graph, matches: int, taken: Collection[fx.Node]) -> None:
        """Tell the listeners; `graph` is searched for near misses outside the nodes in `taken`."""
        findings = self.protect(lambda: find_findings(graph, self.patterns, taken)) or []
        counts = Counter(each.name for each in self.patterns for _ in each.matches)
        places = self.protect(lambda: tuple(_source_lines(self.patterns))) or ()
        record = PassRecord(
            *(self.name, compile_id(), len(self.patterns), int(matches), counts, places, tuple(findings), self.error)
        )
        _tell(record)


def _source_lines(patterns: Sequence[ObservedPattern]) -> Iterator[str]:
    """Yield the source line of each match."""
    for match in (match for each in patterns for match in each.matches if match):
        yield str(select_meta(match[-1]).get(SOURCE, ""))


def _tell(record: PassRecord) -> None:
    """Give a record to the listeners. An error of one is printed, and does not reach the compilation."""
    if _state.effects is not None:
        _state.effects.add(bool(record.matches or record.changes))
    for listener in tuple(_listeners):
        try:
            listener(record)
        except Exception as error:
            with suppress(OSError):
                print(f"inlay: the record of {record.name} is lost: {one_line(error)}", file=sys.stderr)


@functools.lru_cache(maxsize=4096)
def _converted(pattern: Any) -> Any:
    return convert_pattern(pattern)


def _explain_refusal(entry: Any, match: Any) -> tuple[list[str], PatternDifference]:
    """Explain why the check of an entry refused a match: the shape-specific pattern, or the check of its author."""
    root = next(node for node in match.output_nodes() if node is not None)
    nodes = [root.name, *(node.name for node in match.nodes)]
    specific = _state.specific
    tree = convert_pattern(specific) if specific is not None else None
    if tree is not None and not (matched := specific.match(root)):
        found = InductorAligner(tree, {}).best_match(root)
        if found is None:
            text = f"Inductor's matcher says: {matched}"
            return nodes, PatternDifference(Reason.REFUSED, text, root, cost=MAX_DIFFERENCES + 1)
        return nodes, replace(min(found.differences, key=lambda each: each.node), cost=found.cost)
    check = _plain(_nonlocals(entry.extra_check).get("extra_check", entry.extra_check))
    code, name = getattr(check, "__code__", None), getattr(check, "__qualname__", repr(check))
    where = f"{name}, {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else name
    return nodes, PatternDifference(Reason.REFUSED, f"its extra_check returned False ({where})", root)


def entry_name(entry: Any) -> str:
    """Return the name of a pattern: the one it was registered with, or of its function."""
    if getattr(entry, "pattern_name", None):
        return str(entry.pattern_name)
    function = getattr(entry, "handler", None) or _nonlocals(entry.extra_check).get("search_fn")
    return _function_name(function) or type(entry).__name__


def _function_name(function: Any) -> str:
    return str(getattr(_plain(function), "__qualname__", "")).replace(".<locals>", "")


def _plain(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _nonlocals(function: Any) -> dict[str, Any]:
    try:
        return dict(inspect.getclosurevars(function).nonlocals)
    except TypeError:
        return {}


def _inductor_pass_name(watched: Any) -> str:
    """Return the name of a pass, or else the variable of its caller's module that holds it."""
    if watched.pass_name:
        return str(watched.pass_name)
    frame = _caller()
    for name, value in list(frame.f_globals.items()):
        if value is watched:
            return f"{_module(frame)}.{name}"
        held: Sequence[Any] = value if isinstance(value, (list, tuple)) else ()
        for index, each in enumerate(held):
            if each is watched:
                return f"{_module(frame)}.{name}[{index}]"
    return f"{_module(frame)}.{frame.f_code.co_name}"


def _caller() -> FrameType:
    """Return the frame that called torch's matcher."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_SKIPPED_CALLERS):
        frame = frame.f_back
    return frame


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).rpartition(".")[2]


def _replaced_pattern() -> str:
    """Return the name of the pattern that `replace_pattern` was called with."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_replace_pattern":
        frame = frame.f_back
    return _function_name(frame.f_locals.get("pattern")) or "pattern" if frame is not None else "pattern"
