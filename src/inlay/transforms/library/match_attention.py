"""Replace attention by `inlay.attention`, with grouped instead of repeated heads, and causal and window for the mask.

k = clone(expand(unsqueeze(k, 2), …)).view(…)                   inlay.attention(q, k, v, None, scale, causal=True, …)
scaled_dot_product_attention(q, k, v, mask)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

import inlay.ops  # noqa: F401 - registers the operators
from inlay.analysis.masks.classification import MaskAnalysis, find_alibi_slopes
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import all_graphs, find_write_between, sizes
from inlay.rewrite import Match, Reason, Refusal
from inlay.transforms.base import Case, Numerics, ProgramTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.program.program import Program
    from inlay.rewrite import Rewriter

aten = torch.ops.aten
_SDPA = aten.scaled_dot_product_attention.default
_CANONICAL = torch.ops.inlay.attention.default


@transform(
    "match_attention",
    stage=Stage.CANONICALIZE,
    numerics=Numerics.ROUNDING,
    anchors=("aten.scaled_dot_product_attention.default",),
)
class MatchAttention(ProgramTransform):
    """Replace attention by one operator with grouped heads, and a causal or window mask by arguments."""

    is_required = True

    @classmethod
    def positive_cases(cls) -> list[Case]:
        query, key, added = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 1, 5, 5)
        sdpa = torch.nn.functional.scaled_dot_product_attention

        def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, _repeat(k, 2), _repeat(v, 2), is_causal=True)

        def scaled(q: Tensor, k: Tensor, factors: Tensor) -> Tensor:
            heads = (k[:, :, None] * factors).view(2, 4, 5, 8)
            return sdpa(q, heads, heads)

        def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            key, value = (each[:, None].expand(2, 2, 2, 5, 8).reshape(2, 4, 5, 8) for each in (k, v))
            return sdpa(q, key, value)

        def in_one_axis(q: Tensor, k: Tensor) -> Tensor:
            heads = _repeat(k, 2).view(1, 8, 5, 8)
            return sdpa(q.view(1, 8, 5, 8), heads, heads)

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
            Case("heads repeated and scaled", scaled, (query, key, torch.randn(2, 1, 1))),
            Case("heads one after the other", tiled, (query, key, key)),
            Case("sequences and heads in one axis", in_one_axis, (query, key)),
            Case("same heads, no mask", lambda q, k, v: sdpa(q, k, v, scale=0.3), (query, query, query)),
            Case("a mask from outside", lambda q, k, m: sdpa(q, k, k, attn_mask=m), (query, query, added)),
            Case("a mask and a number", lambda q, k, m: sdpa(q, k, k, attn_mask=m + 1), (query, query, added)),
            Case("a causal mask", masked, (query, query, query)),
            Case("a window", windowed, (query, query, query)),
            Case("a mask that is not causal", prefixed, (query, query, query)),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return [
            Case("three axes", lambda q, k: sdpa(q, k, k), (query[0], key[0])),
            Case("values of one head", lambda q, k: sdpa(q, k, k[:, :1]), (query, key)),
            Case("keys of one sequence", lambda q, k: sdpa(q, k[:1], k[:1]), (query, key)),
            Case("any number of heads", lambda q, k: sdpa(q, k, k), (query, key), axes={"q": {1: "n"}, "k": {1: "n"}}),
            Case("no heads", lambda q, k: sdpa(q, k, k), (query[:, :0], key[:, :0])),
            Case("no columns", lambda q, k: sdpa(q, k, k), (query[..., :0], key[..., :0])),
            Case("dropout", lambda q, k: sdpa(q, k, k, dropout_p=0.5), (query, key)),
            Case("causal over another length", lambda q, k: sdpa(q, k, k, is_causal=True), (query[:, :, :3], key)),
            Case("no attention", lambda q, k: torch.softmax(q @ k.transpose(2, 3), -1), (query, key)),
        ]

    def plan(self, program: Program) -> Iterator[Match | Refusal]:
        for _, graph in all_graphs(program.graph):
            masks = MaskAnalysis(graph, program.symbols)
            for node in graph.nodes:
                if node.target in (_SDPA, _CANONICAL):
                    found = _refusal(node) or _arguments(node, masks)
                    if isinstance(found, Refusal):
                        yield found
                    elif node.target is _SDPA or found != dict(normalize_args(node)):
                        yield Match.at(node, **found)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        schema = _CANONICAL._schema.arguments
        operands = tuple(match.values[each.name] for each in schema if not each.kwarg_only)
        usual = {each.name: each.default_value for each in schema if each.kwarg_only}
        options = {name: match.values[name] for name in usual if match.values[name] is not usual[name]}
        with rewriter.inserting_before(match.root, match.root):
            made = rewriter.call(_CANONICAL, operands, options)
        rewriter.replace(match.root, made)
        rewriter.erase(match.root)

    def clean_up(self, rewriter: Rewriter) -> None:
        """Erase masks and repeated heads that are no longer read."""
        for _, graph in all_graphs(rewriter.program.graph):
            rewriter.erase_unused(*reversed(graph.nodes))


def _refusal(node: fx.Node) -> Refusal | None:
    """Return why a call cannot be rewritten, or None."""
    if node.target is not _SDPA:
        return None
    given = dict(normalize_args(node))
    query = given["query"].meta["val"]
    if query.dim() != 4:
        text = f"the query has {query.dim()} axes, expected [batch, heads, length, head]"
        return Refusal(node, node, Reason.SHAPE, text)
    key, value = given["key"].meta["val"], given["value"].meta["val"]
    if sizes(key)[:3] != sizes(value)[:3]:
        return Refusal(node, node, Reason.SHAPE, "key and value differ in batch, heads or length")
    if not all(type(size) is int for size in (query.shape[1], key.shape[1], query.shape[3])):
        return Refusal(node, node, Reason.SHAPE, "the number of heads or the head size is dynamic")
    if not key.shape[1]:
        return Refusal(node, node, Reason.SHAPE, "there are no heads")
    if not query.shape[3]:
        return Refusal(node, node, Reason.SHAPE, "the head size is 0")
    if sizes(query)[0] != sizes(key)[0] or query.shape[1] % key.shape[1]:
        text = "query and key differ in batch, or the query heads are not a multiple of the key heads"
        return Refusal(node, node, Reason.SHAPE, text)
    if given["dropout_p"]:
        return Refusal(node, node, Reason.CONSTANT, "dropout is on")
    if given["is_causal"] and str(query.shape[2]) != str(key.shape[2]):
        return Refusal(node, node, Reason.SHAPE, "attention is causal, and key and query differ in length")
    return None


def _arguments(node: fx.Node, masks: MaskAnalysis) -> dict[str, Any]:
    """Return the arguments of the canonical operator: heads without repetition, the mask as flags where possible."""
    given: dict[str, Any] = dict(normalize_args(node))
    query, key, value = given["query"], given["key"], given["value"]
    mask = given["attn_mask"] if node.target is _SDPA else given["mask"]
    causal = bool(given["is_causal"] if node.target is _SDPA else given["causal"])
    window = given.get("window", 0)
    plain_key, plain_value = (_undo_head_repeat(each, node) for each in (key, value))
    heads = [each.meta["val"].shape[1] for each in (query, plain_key, plain_value)]
    if all(type(each) is int for each in heads) and heads[1] == heads[2] and heads[0] % heads[1] == 0:
        key, value = plain_key, plain_value
    slopes = given.get("slopes")
    if causal:
        mask = None  # torch accepts only one of the two, and inlay.attention ignores the mask
    if mask is not None and slopes is None and not given.get("softcap", 0.0):
        slopes, mask = _split_slopes(mask, node, masks)
    if mask is not None:
        meaning = masks.classify(mask, node)
        if meaning.is_known and _has_score_shape(mask, query, key, exactly=meaning.is_causal):
            causal, window, mask = meaning.is_causal, meaning.window, None
    scale = given["scale"] if given["scale"] is not None else query.meta["val"].shape[-1] ** -0.5
    asked = {"query": query, "key": key, "value": value, "mask": mask, "scale": float(scale), "causal": causal}
    options = {"slopes": slopes, "sinks": given.get("sinks"), "zero_rows": given.get("zero_rows", True)}
    return asked | {"window": window, "softcap": given.get("softcap", 0.0)} | options


def _has_score_shape(mask: fx.Node, query: fx.Node, key: fx.Node, *, exactly: bool) -> bool:
    """Return whether a mask broadcasts to the scores; with `exactly`, not in rows and columns."""
    (*batch_and_heads, rows, _), columns = sizes(query.meta["val"]), sizes(key.meta["val"])[2]
    scores = [*batch_and_heads, rows, columns]
    given = sizes(mask.meta["val"])
    broadcast = all(one in ("1", two) for one, two in zip(reversed(given), reversed(scores), strict=False))
    return len(given) <= 4 and broadcast and (not exactly or given[-2:] == scores[2:])


def _split_slopes(mask: fx.Node, attention: fx.Node, masks: MaskAnalysis) -> tuple[fx.Node | None, fx.Node | None]:
    """Split what is added to the scores into ALiBi slopes, one per head, and the rest."""
    dtype = attention.meta["val"].dtype
    sides = [mask.args, tuple(reversed(mask.args))] if mask.target is aten.add.Tensor and len(mask.args) == 2 else []
    for bias, rest in sides:
        if not isinstance(bias, fx.Node) or not isinstance(rest, fx.Node):
            continue
        if {bias.meta["val"].dtype, rest.meta["val"].dtype} != {dtype}:
            continue  # booleans are added as 1 and 0, but a boolean mask shows or hides keys
        factor = find_alibi_slopes(bias, masks, attention)
        if factor is not None and find_write_between(factor, attention) is None:
            return factor, rest
    return None, mask


def _undo_head_repeat(node: fx.Node, attention: fx.Node) -> fx.Node:
    """Return the heads before view(clone(expand(unsqueeze(x, 2)))) repeated them, or the node itself."""
    steps: list[fx.Node] = []
    at: Any = node
    for targets in ({aten.view.default, aten._unsafe_view.default, aten.reshape.default}, {aten.clone.default}):
        if at.target in targets:
            steps.append(at)
            at = at.args[0]
    if at.target is not aten.expand.default:
        return node
    expanded, inner = at.meta["val"], at.args[0]
    if inner.target is not aten.unsqueeze.default or dict(normalize_args(inner))["dim"] != -3 or expanded.dim() != 5:
        return node
    source: Any = inner.args[0]
    batch, heads, times, *rest = sizes(expanded)
    if not (heads.isdigit() and times.isdigit()):
        return node
    repeated = [batch, str(int(heads) * int(times)), *rest]
    if sizes(source.meta["val"]) != [batch, heads, *rest] or sizes(node.meta["val"]) != repeated:
        return node
    return source if find_write_between(inner, attention) is None else node


def _repeat(heads: Tensor, times: int) -> Tensor:
    batch, count, length, size = heads.shape
    return heads[:, :, None, :, :].expand(batch, count, times, length, size).reshape(batch, count * times, length, size)
