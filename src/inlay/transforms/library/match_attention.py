"""Attention becomes `inlay.attention`: grouped heads instead of repeated ones, causal and window instead of a mask.

k = clone(expand(unsqueeze(k, 2), …)).view(…)                   inlay.attention(q, k, v, None, scale, causal=True, …)
scaled_dot_product_attention(q, k, v, mask)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.graphs import all_graphs, provenance, sizes, written_between
from inlay.rewrite import Miss, alibi
from inlay.rewrite.masks import Masks
from inlay.rewrite.schema import normalised
from inlay.transforms.base import Applied, Case, Numerics, Stage, Transform, transform

if TYPE_CHECKING:
    from inlay.program.program import Program

aten = torch.ops.aten
_SDPA = aten.scaled_dot_product_attention.default
_CANONICAL = torch.ops.inlay.attention.default


@transform(
    "match_attention",
    stage=Stage.CANONICALIZE,
    numerics=Numerics.ROUNDING,
    anchors=("aten.scaled_dot_product_attention.default",),
)
class MatchAttention(Transform):
    """Attention becomes one operator with grouped heads and a causal flag where the mask is one."""

    @classmethod
    def fires(cls) -> list[Case]:
        query, key, added = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 1, 5, 5)
        sdpa = torch.nn.functional.scaled_dot_product_attention

        def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, _repeat(k, 2), _repeat(v, 2), is_causal=True)

        def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            places = torch.arange(5)
            return sdpa(q, k, v, attn_mask=(places[None, :] <= places[:, None])[None, None])

        def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            places = torch.arange(5)
            gap = places[:, None] - places[None, :]
            return sdpa(q, k, v, attn_mask=torch.where((gap >= 0) & (gap - 1.0 < 1 + 1), 0.0, float("-inf")))

        def prefixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            places = torch.arange(5)
            return sdpa(q, k, v, attn_mask=(places[None, :] <= places[:, None]) | (places[None, :] < 2))

        return [
            Case("repeated heads", grouped, (query, key, key)),
            Case("same heads, no mask", lambda q, k, v: sdpa(q, k, v, scale=0.3), (query, query, query)),
            Case(
                "a mask from outside",
                lambda q, k, m: sdpa(q, k, k, attn_mask=m),
                (query, query, added),
            ),
            Case("a causal mask", masked, (query, query, query)),
            Case("a window", windowed, (query, query, query)),
            Case("a mask that is not causal", prefixed, (query, query, query)),
        ]

    @classmethod
    def leaves(cls) -> list[Case]:
        query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return [
            Case("three axes", lambda q, k: sdpa(q, k, k), (query[0], key[0])),
            Case("values of one head", lambda q, k: sdpa(q, k, k[:, :1]), (query, key)),
            Case("keys of one sequence", lambda q, k: sdpa(q, k[:1], k[:1]), (query, key)),
            Case("no heads", lambda q, k: sdpa(q, k, k), (query[:, :0], key[:, :0])),
            Case("no columns", lambda q, k: sdpa(q, k, k), (query[..., :0], key[..., :0])),
            Case("dropout", lambda q, k: sdpa(q, k, k, dropout_p=0.5), (query, key)),
            Case("causal over another length", lambda q, k: sdpa(q, k, k, is_causal=True), (query[:, :, :3], key)),
            Case("no attention", lambda q, k: torch.softmax(q @ k.transpose(2, 3), -1), (query, key)),
        ]

    def apply(self, program: Program) -> Applied:
        applied = Applied(program, 0)
        for _, graph in all_graphs(program.graph):
            masks = Masks(graph)
            for node in list(graph.nodes):
                if node.target not in (_SDPA, _CANONICAL):
                    continue
                reason = _refuse(node) if node.target is _SDPA else ""
                arguments = _arguments(node, masks) if not reason else {}
                if reason:
                    applied.misses.append(Miss(node, node, reason, 1, 1, refused=True))
                elif node.target is _CANONICAL and arguments == dict(normalised(node)):
                    continue
                elif self.takes(node):
                    applied.places.append(node.name)
                    _replace(graph, node, arguments)
                    applied.sites += 1
            graph.eliminate_dead_code()
        return applied


def _refuse(node: fx.Node) -> str:
    given = dict(normalised(node))
    query = given["query"].meta["val"]
    if query.dim() != 4:
        return f"shape: the query has {query.dim()} axes, not batch, heads, length, head"
    key, value = given["key"].meta["val"], given["value"].meta["val"]
    if sizes(key)[:3] != sizes(value)[:3]:
        return "shape: key and value differ in batch, heads or length"
    if not int(key.shape[1]):
        return "shape: there are no heads"
    if not int(query.shape[3]):
        return "shape: heads have no columns"
    if sizes(query)[0] != sizes(key)[0] or int(query.shape[1]) % int(key.shape[1]):
        return "shape: the heads of the query are not groups of those of the key"
    if given["dropout_p"]:
        return "constant differs: dropout is on"
    if given["is_causal"] and str(query.shape[2]) != str(given["key"].meta["val"].shape[2]):
        return "shape: causal attention over another length than the query's"
    return ""


def _arguments(node: fx.Node, masks: Masks) -> dict[str, Any]:
    """The arguments of the canonical operator for this node: heads not repeated, the mask as flags where it is one."""
    given: dict[str, Any] = dict(normalised(node))
    query, key, value = given["query"], given["key"], given["value"]
    mask = given["attn_mask"] if node.target is _SDPA else given["mask"]
    causal = bool(given["is_causal"] if node.target is _SDPA else given["causal"])
    window = given.get("window", 0)
    plain_key, plain_value = (_unrepeated(each, node) for each in (key, value))
    if _heads(plain_key) == _heads(plain_value) and _heads(query) % _heads(plain_key) == 0:
        key, value = plain_key, plain_value
    slopes = given.get("slopes")
    if causal:
        mask = None  # neither operator takes both; ours does not look at it
    if mask is not None and slopes is None and not given.get("softcap", 0.0):
        slopes, mask = _without_slopes(mask, node, masks)
    if mask is not None:
        meaning = masks.meaning(mask, node)
        if meaning.known and _fits(mask, query, key, exactly=meaning.causal):
            causal, window, mask = meaning.causal, meaning.window, None
    scale = given["scale"] if given["scale"] is not None else query.meta["val"].shape[-1] ** -0.5
    asked = {"query": query, "key": key, "value": value, "mask": mask, "scale": float(scale), "causal": causal}
    options = {"slopes": slopes, "sinks": given.get("sinks"), "zero_rows": given.get("zero_rows", True)}
    return asked | {"window": window, "softcap": given.get("softcap", 0.0)} | options


def _fits(mask: fx.Node, query: fx.Node, key: fx.Node, *, exactly: bool) -> bool:
    """Does a mask have the sizes of the scores, or 1; `exactly`: no 1 for rows and columns?"""
    (*batch_and_heads, rows, _), columns = sizes(query.meta["val"]), sizes(key.meta["val"])[2]
    scores = [*batch_and_heads, rows, columns]
    given = sizes(mask.meta["val"])
    broadcast = all(one in ("1", two) for one, two in zip(reversed(given), reversed(scores), strict=False))
    return len(given) <= 4 and broadcast and (not exactly or given[-2:] == scores[2:])


def _without_slopes(mask: fx.Node, attention: fx.Node, masks: Masks) -> tuple[fx.Node | None, fx.Node | None]:
    """The slopes in what is added to the scores, one a head, and the rest of it."""
    dtype = attention.meta["val"].dtype
    sides = [mask.args, tuple(reversed(mask.args))] if mask.target is aten.add.Tensor and len(mask.args) == 2 else []
    for bias, rest in sides:
        if not isinstance(bias, fx.Node) or not isinstance(rest, fx.Node):
            continue
        if {bias.meta["val"].dtype, rest.meta["val"].dtype} != {dtype}:
            continue  # true and false are added as 1 and 0, and show or hide where they are a mask of their own
        factor = alibi.slopes(bias, masks, attention)
        if factor is not None and written_between(factor, attention) is None:
            return factor, rest
    return None, mask


def _replace(graph: fx.Graph, node: fx.Node, arguments: dict[str, Any]) -> None:
    schema = _CANONICAL._schema.arguments
    operands = tuple(arguments[each.name] for each in schema if not each.kwarg_only)
    usual = {each.name: each.default_value for each in schema if each.kwarg_only}
    options = {name: arguments[name] for name in usual if arguments[name] is not usual[name]}
    with graph.inserting_before(node):
        new = graph.call_function(_CANONICAL, operands, options)
    new.meta = {"val": node.meta["val"]} | provenance(node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _heads(node: fx.Node) -> int:
    return int(node.meta["val"].shape[1])


def _unrepeated(node: fx.Node, attention: fx.Node) -> fx.Node:
    """The heads before each was repeated, or the node itself: view(clone(expand(unsqueeze(x, 2))))."""
    steps: list[fx.Node] = []
    at: Any = node
    for targets in ({aten.view.default, aten._unsafe_view.default, aten.reshape.default}, {aten.clone.default, None}):
        if at.target in targets:
            steps.append(at)
            at = at.args[0]
        elif None not in targets:
            return node
    if at.target is not aten.expand.default:
        return node
    expanded, inner = at.meta["val"], at.args[0]
    if inner.target is not aten.unsqueeze.default or dict(normalised(inner))["dim"] != -3 or expanded.dim() != 5:
        return node
    source: Any = inner.args[0]
    before, after = source.meta["val"], node.meta["val"]
    grown = sizes(expanded)
    if before.dim() != 4 or [*grown[:2], *grown[3:]] != sizes(before):
        return node
    if after.dim() != 4 or int(after.shape[1]) != int(expanded.shape[1]) * int(expanded.shape[2]):
        return node
    same = sizes(after)[2:] == sizes(before)[2:]
    return source if same and written_between(inner, attention) is None else node


def _repeat(heads: Tensor, times: int) -> Tensor:
    batch, count, length, size = heads.shape
    return heads[:, :, None, :, :].expand(batch, count, times, length, size).reshape(batch, count * times, length, size)
