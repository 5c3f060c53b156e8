"""Spoil one of three sites of a foreign pattern, and compare what the watch says first with what was done.

The patterns are those that Inductor registers for attention, and patterns written like vLLM's, with custom operators
that are functional or wrapped in `auto_functionalized`. `python -m tests.insight.watch.foreign_sites --seed 1 --count
200` prints the share that was explained rightly.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.fx_passes.fuse_attention import _get_sfdp_patterns
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from inlay.insight.watch import watch_patterns
from inlay.integrations.foreign_patterns import convert_graph
from inlay.program.graph_import import import_graph
from inlay.program.graphs import MODULE, SOURCE
from inlay.rewrite.pattern_trees import PatternCall, PatternVariable
from inlay.rewrite.reasons import Reason
from tests.insight import mutations
from tests.insight.mutated_models import Verdict
from tests.insight.mutations import Impossible, Place, Right

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


LAYERS, SPOILED = 3, 1


@torch.library.custom_op("foreign_sites::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute an RMS norm."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("foreign_sites::rms_norm_out", mutates_args=("out",))
def rms_norm_out(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Write an RMS norm."""


@torch.library.custom_op("foreign_sites::quantize_out", mutates_args=("out",))
def quantize_out(out: Tensor, x: Tensor, scale: Tensor) -> None:
    """Write quantized values."""


@torch.library.custom_op("foreign_sites::silu_and_mul_out", mutates_args=("out",))
def silu_and_mul_out(out: Tensor, x: Tensor) -> None:
    """Write a gated product."""


_OPS = torch.ops.foreign_sites


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _OPS.rms_norm.default(total, weight, 1e-6), total


def _norm_quantize(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, result: Tensor) -> Any:
    normed = auto_functionalized(_OPS.rms_norm_out.default, out=out, x=x, weight=weight, eps=1e-6)
    return auto_functionalized(_OPS.quantize_out.default, out=result, x=normed[1], scale=scale)[1]


def _gate_quantize(x: Tensor, scale: Tensor, out: Tensor, result: Tensor) -> Any:
    gated = auto_functionalized(_OPS.silu_and_mul_out.default, out=out, x=x)
    return auto_functionalized(_OPS.quantize_out.default, out=result, x=gated[1], scale=scale)[1]


def _norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = _OPS.rms_norm.default(x.view(2, 4, 8), weight, 1e-6).transpose(0, 1)
    first, second = heads[..., :4], heads[..., 4:]
    return heads * cos + torch.cat([-second, first], -1) * sin


def _written_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _written_gate(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * y


def _own_patterns() -> Iterator[tuple[Callable[..., Any], list[Tensor]]]:
    full, vector, one = torch.empty(4, 8), torch.empty(8), torch.empty(1)
    yield _add_norm, [full, full.clone(), vector]
    yield _norm_quantize, [full, vector, one, full.clone(), full.clone()]
    yield _gate_quantize, [torch.empty(4, 16), one, full, full.clone()]
    yield _norm_rope, [torch.empty(2, 32), vector, torch.empty(4, 2, 8), torch.empty(4, 2, 8)]
    yield _written_norm, [full, vector]
    yield _written_gate, [full, full.clone()]


@dataclass(frozen=True, eq=False)
class ForeignPattern:
    """A registered pattern, and the graph of one site."""

    name: str
    passes: PatternMatcherPass
    site: fx.Graph
    """Its placeholders are tensors only."""


@functools.cache
def mode() -> FakeTensorMode:
    return FakeTensorMode()


@functools.cache
def foreign_patterns() -> tuple[ForeignPattern, ...]:
    """Return the patterns that match three sites of their own, unspoiled."""
    found = []
    with mode(), torch.no_grad():
        named: list[tuple[str, Any, list[Any], dict[str, Any]]] = [
            (search.__name__, search, inputs, {}) for search, inputs in _own_patterns()
        ]
        for name, given in _get_sfdp_patterns(torch.device("cpu")):
            if name.endswith("_inference") and "half" not in name:
                inputs = [each.detach() if isinstance(each, Tensor) else each for each in given["example_inputs"]]
                options = {"scalar_workaround": given["scalar_workaround"]}
                named.append((name, given["search_fn"], inputs, options))
        for name, search, inputs, options in named:
            passes = PatternMatcherPass(pass_name=name)
            register_replacement(search, search, inputs, fwd_only, [passes], **options)
            scalars = options.get("scalar_workaround") or {}
            found.append(ForeignPattern(name, passes, fwd_only(functools.partial(search, **scalars), inputs).graph))
    return tuple(each for each in found if _matches(each))


def _matches(pattern: ForeignPattern) -> bool:
    module, _ = three_sites(pattern)
    with mode(), watch_patterns() as records:
        pattern.passes.apply(module)
    return records[0].matches == LAYERS


def three_sites(pattern: ForeignPattern) -> tuple[fx.GraphModule, list[dict[fx.Node, fx.Node]]]:
    """Return a graph with three sites as layers, and for each the nodes of the pattern's own graph in it."""
    graph, maps, outputs = fx.Graph(), [], []
    for layer in range(LAYERS):
        mapping: dict[fx.Node, fx.Node] = {}
        for line, node in enumerate(pattern.site.nodes, 1):
            if node.op == "output":
                outputs += [mapping[each] for each in node.all_input_nodes]
                continue
            made = graph.node_copy(node, mapping.__getitem__)
            made.target = made.name if node.op == "placeholder" else node.target
            made.meta = {"val": node.meta.get("val"), MODULE: f"model.layers.{layer}", SOURCE: f"model.py:{line}"}
            mapping[node] = made
        maps.append(mapping)
    order = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(iter(graph.nodes))
    for node in reversed(order):
        first.prepend(node)
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph), maps


def commuted(place: Place) -> Right:
    """The operands of a sum or product are written the other way round, which Inductor's matcher does not accept."""
    aten = torch.ops.aten
    choices = [node for node in place.calls.values() if node.target in (aten.add.Tensor, aten.mul.Tensor)]
    choices = [node for node in choices if len(node.all_input_nodes) == 2 and len(node.args) == 2]
    node = mutations._pick(place.rng, choices)
    node.args = (node.args[1], node.args[0])
    return mutations._right([node], Reason.MISSING)


KINDS: tuple[Callable[[Place], Right], ...] = (
    *(mutations.second_consumer, mutations.other_reader, mutations.other_constant, mutations.other_axis),
    *(mutations.cast_between, mutations.extra_node, mutations.lacking_node, mutations.other_operator),
    *(mutations.written_out, mutations.swapped_operands, mutations.write_between, commuted),
)


def verdicts(seed: int | str, count: int) -> Iterator[Verdict]:
    """Spoil and explain, `count` times; kinds take turns, what still matches is drawn again."""
    rng, made, tried = random.Random(seed), 0, 0
    while made < count:
        kind = KINDS[tried % len(KINDS)]
        tried += 1
        verdict = _draw(rng, kind)
        if verdict is not None:
            made += 1
            yield verdict


def _draw(rng: random.Random, kind: Callable[[Place], Right]) -> Verdict | None:
    pattern = rng.choice(foreign_patterns())
    module, maps = three_sites(pattern)
    program = import_graph(module.graph, pattern.name)
    nodes = {node.name: node for node in program.graph.nodes}
    own = {node.name: nodes[copied.name] for node, copied in maps[SPOILED].items()}
    tree, calls = _calls(pattern.site, own)
    values = {name: own[name] for name in tree if name in own}
    output = own[next(reversed([node for node in pattern.site.nodes if node.op == "output"])).all_input_nodes[0].name]
    with mode():
        try:
            right = kind(Place(program, calls, values, output, rng))
        except Impossible:
            return None
        spoiled = fx.GraphModule(torch.nn.Module(), program.graph)
        with watch_patterns() as records:
            pattern.passes.apply(spoiled)
    record = records[0]
    if record.matches != LAYERS - 1:
        return None
    assert not record.error, record.error
    first = next(iter(record.near_misses), None)
    return Verdict(kind.__name__, "foreign", pattern.name, output.name, SPOILED, right, first)


def _calls(site: fx.Graph, own: dict[str, fx.Node]) -> tuple[list[str], dict[PatternCall, fx.Node]]:
    """Return the variables of a site, and the calls of its tree with the nodes of the spoiled layer."""
    tree = convert_graph(site)
    assert tree is not None
    found: dict[PatternCall, fx.Node] = {}
    todo: list[tuple[Any, fx.Node]] = [
        (call, node) for call, node in zip(tree.outputs, site.output_node().all_input_nodes, strict=True)
    ]
    while todo:
        call, node = todo.pop()
        if isinstance(call, PatternCall) and call not in found:
            found[call] = own[node.name]
            given = [value for _, value in call.args]
            flat = [each for value in given for each in (value if isinstance(value, list) else [value])]
            inner = [each for each in flat if isinstance(each, (PatternCall, PatternVariable))]
            todo += zip(inner, _operands(node), strict=False)
    return list(tree.variables), found


def _operands(node: fx.Node) -> list[fx.Node]:
    return [each for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--count", type=int, default=200)
    given = parser.parse_args()
    tally: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for verdict in verdicts(given.seed, given.count):
        tally[verdict.kind] += 1
        right[verdict.kind] += verdict.ok
        if not verdict.ok:
            print(verdict)
    for kind, number in sorted(tally.items()):
        print(f"{kind:20} {right[kind]:4} of {number}")
    print(
        f"{right.total()} of {tally.total()} ({right.total() / tally.total():.1%}), {len(foreign_patterns())} patterns"
    )


if __name__ == "__main__":
    main()
