"""External passes: any `GraphModule → GraphModule` callable as a transform."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.errors import TransformError, UsageError, one_line, suggest
from inlay.integrations.external_graph import check_boundary, normalize_graph
from inlay.integrations.tensorrt_llm import find_autodeploy_pass, is_autodeploy
from inlay.program.graphs import all_graphs, all_nodes, attach_subgraphs, copy_graph, labels, subgraphs, target_text
from inlay.program.text.printer import dump
from inlay.rewrite.pattern_trees import called_operators, make_replacement_pass
from inlay.transforms.base import Numerics, Stage, Transform, TransformOptions, TransformResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from inlay.program.program import Program


_PASS_NAME = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")


class ExternalPass(Transform):
    """A pass that was not written for Inlay.

    It gets a GraphModule whose parameters and buffers are placeholders, and may change it in place or return another
    one. Its match count is the number it returns, as for Inductor's pattern passes, or its `matched_count`. For a pass
    without a count, `sites` is the number of calls that it changed. Its numerics are unknown, so they are taken as
    approximate.
    """

    stage, numerics = Stage.CLEAN, Numerics.APPROXIMATE

    def __init__(self, function: Any, options: TransformOptions | None = None) -> None:
        super().__init__(options)
        self.adapter = adapt_pass(function)

    def apply(self, program: Program) -> TransformResult:
        before, module = dump(program), _module(program)
        returned, count = self.adapter(module)
        result = _result(returned, module)
        graph = result.graph
        normalize_graph(graph, program)
        check_boundary(graph, program)
        attach_subgraphs(graph, dict(subgraphs(graph)))
        made = replace(program, graph=graph)
        if dump(made) == before:
            claimed = [f"It reports {count} matches, but the program is unchanged."] if count else []
            return TransformResult(made, 0, notes=[*claimed, *level_notes(self.adapter.source, program)])
        if count is None:
            return TransformResult(made, _count_changed_calls(program, made), has_site_count=False)
        return TransformResult(made, count or 1, has_site_count=bool(count))

    def skip_reason(self, program: Program) -> str:
        """Return why the pass says that it was skipped, or that the program lacks operators of all its patterns."""
        patterns, lacking = _lacking_operators(self.adapter.source, program)
        if patterns and len(lacking) == len(patterns):
            return f"the program does not call {_names(lacking)}"
        return str(getattr(self.adapter.source, "skip_reason", ""))


def _count_changed_calls(before: Program, after: Program) -> int:
    """Count the calls that only one of the programs has, regardless of names and operands; at least 1."""
    one, two = (
        Counter(label for _, graph in all_graphs(each.graph) for label in labels(graph, each.types))
        for each in (before, after)
    )
    return max((one - two).total(), (two - one).total(), 1)


def load_external_pass(text: str) -> Transform:
    """Return the transform for `package.module:callable` or `autodeploy:NAME`.

    >>> load_external_pass("torch.fx:no_such_pass")
    Traceback (most recent call last):
    ...
    inlay.errors.UsageError: torch.fx has no no_such_pass. Name a pass: package.module:callable.
    """
    return _named(text, import_pass(text))


def from_replacement(
    search: Callable[..., Any], replace: Callable[..., Any], example_inputs: Sequence[Any], **options: Any
) -> Transform:
    """Return a transform from the arguments of Inductor's `register_replacement`, to run or explain it alone.

    `options` are further arguments of `register_replacement`, such as `extra_check` or `trace_fn`.

    >>> made = from_replacement(lambda x: x.relu() + 1, lambda x: x.clamp(0) + 1, [torch.empty(3)])
    >>> made.name
    '<lambda>'
    """
    name = str(getattr(search, "__qualname__", type(search).__name__)).rpartition(".")[2]
    return _named(name, make_replacement_pass(search, replace, example_inputs, name, **options))


def _named(name: str, function: Any) -> Transform:
    named = type("ExternalPass", (ExternalPass,), {"name": name, "__doc__": ExternalPass.__doc__})
    made: Transform = named(function)
    return made


def is_external(text: str) -> bool:
    """Return whether this names an external pass, not one of Inlay's transforms.

    >>> is_external("package.module:callable"), is_external("match_rope")
    (True, False)
    """
    return ":" in text


def import_pass(text: str) -> Any:
    """Import `package.module:callable` from an installed package or the current folder, or find `autodeploy:NAME`."""
    if is_autodeploy(text):
        return find_autodeploy_pass(text)
    if not _PASS_NAME.match(text):
        raise UsageError(f"{text} does not name a pass.", "Write package.module:callable.")
    name, _, path = text.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        hint = suggest(missing, _sibling_modules(missing)) if name.startswith(missing) else f"{name} imports it."
        remedy = hint or "Run from the folder that holds it, or install it."
        raise UsageError(f"{text}: there is no Python module {missing}.", remedy) from error
    except Exception as error:
        problem = f"{text}: importing {name} failed: {type(error).__name__}: {one_line(error)}."
        raise UsageError(problem, "Fix the import error above.") from error
    for part in path.split("."):
        if not hasattr(found, part):
            owner = getattr(found, "__name__", name)
            remedy = suggest(part, dir(found)) or "Name a pass: package.module:callable."
            raise UsageError(f"{owner} has no {part}.", remedy)
        found = getattr(found, part)
    adapt_pass(found, text)
    return found


def _sibling_modules(name: str) -> Iterable[str]:
    """Return modules to suggest for a name that does not exist."""
    package, _, _ = name.rpartition(".")
    if not package:
        return [*sys.stdlib_module_names, *(each.name for each in pkgutil.iter_modules())]
    paths = getattr(sys.modules.get(package), "__path__", [])
    return [each.name for each in pkgutil.iter_modules(paths, f"{package}.")]


@dataclass(frozen=True)
class PassAdapter:
    """An external pass, and how to call it with a GraphModule."""

    source: Any
    call: Callable[[fx.GraphModule], Any]

    def __call__(self, module: fx.GraphModule) -> tuple[Any, int | None]:
        """Run the pass. Return its result and its match count, which is None if it reports none."""
        counts = isinstance(getattr(self.source, "matched_count", None), int)
        if counts:
            self.source.matched_count = 0  # so that it counts this run, whether the pass adds to it or sets it
        returned = self.call(module)
        if type(returned) is int:
            return None, returned
        return returned, self.source.matched_count if counts else None


def adapt_pass(found: Any, text: str = "") -> PassAdapter:
    """Adapt any kind of pass to be called with a GraphModule. A class is instantiated first."""
    text = text or getattr(found, "__name__", type(found).__name__)
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:
            problem = f"{text} is a class that cannot be instantiated without arguments: {one_line(error)}."
            raise UsageError(problem, "Name a function that creates and calls it.") from error
    if not callable(found):
        # Inductor's collections of patterns are applied, not called.
        if callable(getattr(found, "apply", None)):
            return PassAdapter(found, lambda module: found.apply(module))
        problem = f"{text} is a {type(found).__name__}, which cannot be called."
        raise UsageError(problem, "Name a function, a class or an instance that takes a GraphModule.")
    if takes_graph(found):
        return PassAdapter(found, lambda module: found(module.graph))
    return PassAdapter(found, found)


def _module(program: Program) -> fx.GraphModule:
    """Copy the program to a GraphModule, so that a pass cannot change the program."""
    graph = copy_graph(program.graph)
    return fx.GraphModule(graph.owning_module or torch.nn.Module(), graph, class_name="Program")


def _result(returned: Any, module: fx.GraphModule) -> fx.GraphModule:
    """Return the GraphModule that a pass produced."""
    if hasattr(returned, "graph_module"):
        returned = returned.graph_module
    match returned:
        case None | bool():
            return module
        case fx.GraphModule():
            return returned
        case fx.Graph():
            return fx.GraphModule(module, returned)
    raise TransformError(
        f"The pass returned a {type(returned).__name__}.", "Return a GraphModule, a PassResult, a Graph or nothing."
    )


_LEVEL = "It ran on the captured program, where linear, silu, attention and norms are whole operators"
_REMEDY = (
    "For Inductor's post-grad graph, pass it to torch.compile (options post_grad_custom_post_pass);"
    " `inlay.testing.post_grad_graphs` shows that graph"
)
_MAX_NAMES = 6


def level_notes(source: Any, program: Program) -> list[str]:
    """Explain why a pass that changed nothing may need another graph, such as Inductor's post-grad graph."""
    patterns, impossible = _lacking_operators(source, program)
    if not patterns:
        by_form = callable(source) and takes_graph(source)
        return [f"It takes a graph, as Inductor's post-grad passes do. {_LEVEL}. {_REMEDY}."] if by_form else []
    if not impossible:
        return []
    lacks = f"the program does not call {_names(impossible)} at all"
    return [f"{len(impossible)} of its {len(patterns)} patterns cannot match: {lacks}. {_LEVEL}. {_REMEDY}."]


def _lacking_operators(source: Any, program: Program) -> tuple[list[Any], list[list[set[Any]]]]:
    """Return the patterns of a pass, and for each that cannot match the calls that the program does not have."""
    patterns = [pattern for each in _collections(source) for pattern in _patterns(each)]
    there = {node.target for node in all_nodes(program.graph)}
    absent = [[calls for calls in called_operators(each) if there.isdisjoint(calls)] for each in patterns]
    return patterns, [each for each in absent if each]


def _names(lacking: list[list[set[Any]]]) -> str:
    names = sorted({" or ".join(sorted(map(target_text, calls))[:2]) for each in lacking for calls in each})
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def takes_graph(found: Any) -> bool:
    """Return whether a pass takes an `fx.Graph`. Inductor's passes do, and have a `uuid` or an annotation."""
    if callable(getattr(found, "uuid", None)):
        return True
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return False
    said = parameters[0].annotation if parameters else None
    return said is fx.Graph or (isinstance(said, str) and said.rpartition(".")[2] == "Graph")


def _collections(source: Any) -> Iterator[Any]:
    """Yield the collections of patterns that a pass is, contains, or names in its code."""
    held = [source, *getattr(source, "__dict__", {}).values()]
    code = getattr(source, "__code__", None)
    if code is not None:
        cells = inspect.getclosurevars(source)
        held += [*cells.nonlocals.values(), *cells.globals.values()]
    seen: set[int] = set()
    for each in held:
        if id(each) not in seen and isinstance(getattr(each, "patterns", None), dict) and hasattr(each, "apply"):
            seen.add(id(each))
            yield each


def _patterns(collection: Any) -> Iterator[Any]:
    for entries in collection.patterns.values():
        for entry in entries if isinstance(entries, list) else ():
            if hasattr(entry, "pattern"):
                yield entry.pattern
