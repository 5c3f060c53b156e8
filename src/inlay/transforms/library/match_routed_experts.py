"""Compute routed experts without sorting their rows, by `inlay.expert_linear`.

sorted, order = sort(choice.view(-1))                          inlay.expert_linear(x, choice, gate_up)
ends = histc(sorted, experts).cumsum(0)                        …
grouped_mm(x[order // chosen], gate_up, ends)                  inlay.expert_linear(…, choice, down) * weights
… grouped_mm(…, down, ends) * weights[order]                   (sum over the chosen experts)
[inverse of order]

Models sort the rows of a batch by expert, multiply them group by group, and restore their order. The row of each token
and each of its experts depends on no other row, so every call in between is repeated on rows that are not sorted:
`[token, chosen, …]`. What computes the router's scores and weights, and the activation, does not matter.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import all_graphs, find_write_between, target_text
from inlay.program.symbols import is_data_dependent, is_same_size
from inlay.rewrite import Match, Reason, Refusal, Refused
from inlay.transforms.base import Case, Numerics, ProgramTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.program.program import Program
    from inlay.rewrite import Rewriter

aten = torch.ops.aten
_GROUPED = ("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_ROW_WISE = (
    *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unsqueeze.default),
    *(aten.clone.default, aten._to_copy.default, operator.getitem),
)
"""Calls that keep rows apart if they do not work along the first axis."""
_MOST_EXPERTS = 4097
"""Beyond, a histogram of so many bins puts two experts into one."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@transform("match_routed_experts", stage=Stage.CANONICALIZE, numerics=Numerics.ROUNDING, anchors=_GROUPED)
class MatchRoutedExperts(ProgramTransform):
    """Compute routed experts for rows that are not sorted."""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        tokens, weights = torch.randn(6, 8), _weights()
        return [
            Case("gated", _routed, (tokens, *weights)),
            Case("with biases", _biased, (tokens, *weights, torch.randn(4, 16), torch.randn(4, 8))),
            Case(
                "bfloat16, torch's product", _in_bfloat16, (tokens.bfloat16(), *(each.bfloat16() for each in weights))
            ),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        tokens, weights = torch.randn(6, 8), _weights()

        def read_sorted(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
            made, rows = _experts(x, router, gate_up, down)
            return made, rows

        def other_order(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return _experts(x, router, gate_up, down, restore=lambda rows, order: rows[order])[0]

        def mixed(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return _experts(x, router, gate_up, down, between=lambda rows: rows.cumsum(0))[0]

        def other_tokens(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return _experts(x, router, gate_up, down, divisor=3)[0]

        def backwards(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return _experts(x, router, gate_up, down, descending=True)[0]

        return [
            Case("the sorted rows are read elsewhere", read_sorted, (tokens, *weights)),
            Case("not the inverse order", other_order, (tokens, *weights)),
            Case("rows that are combined", mixed, (tokens, *weights)),
            Case("rows of other tokens", other_tokens, (tokens, *weights)),
            Case("sorted backwards", backwards, (tokens, *weights)),
        ]

    def plan(self, program: Program) -> Iterator[Match | Refusal]:
        for _, graph in all_graphs(program.graph):
            grouped = [node for node in graph.nodes if target_text(node.target) in _GROUPED]
            sorts = dict.fromkeys(found for each in grouped if (found := _sort_of(each)) is not None)
            for node in sorts:
                routing = _Routing(node)
                try:
                    routing.read()
                except Refused as refused:
                    root, count = routing.region[-1] if routing.region else node, len(routing.region)
                    yield Refusal(root, refused.node or node, refused.kind, refused.text, count, count + 1)
                else:
                    yield Match.at(routing.exit, *routing.region, routing=routing)
            for each in grouped:
                if _sort_of(each) is None:
                    yield Refusal(each, each, Reason.MISSING, "the rows are not sorted by expert", 1, 2)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        routing: _Routing = match.values["routing"]
        with rewriter.inserting_before(routing.exit, routing.exit):
            made = routing.write(rewriter)
        rewriter.replace(routing.exit, made)
        rewriter.erase(*reversed(routing.region))


def _is_equal(one: Any, two: Any) -> bool:
    """Whether two sizes are always equal. One that is computed from values may be any."""
    return not is_data_dependent((one, two)) and is_same_size(one, two)


def _product_operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Return the rows, the weight and the ends of a grouped product."""
    given: dict[str, Any] = dict(normalize_args(node))
    if "input" in given:
        return given["input"], given["weight"], given["offs"]
    return given["self"], given["mat2"], given["offs"]


def _sort_of(grouped: fx.Node) -> fx.Node | None:
    """Return the sort whose counts a grouped product reads."""
    *_, at = _product_operands(grouped)
    for target in (aten.cumsum.default, aten.histc.default, aten._to_copy.default, operator.getitem):
        if not isinstance(at, fx.Node) or at.target is not target:
            return None
        at = at.args[0]
    return at if isinstance(at, fx.Node) and at.target is aten.sort.default else None


class _Routing:
    """The calls between a sort of rows by expert and the restored order."""

    def __init__(self, sort: fx.Node) -> None:
        self.sort = sort
        self.region: list[fx.Node] = []
        """All calls that are replaced, in order; the exit is the last."""
        self._reads: list[fx.Node] = []
        """Values from before the region that the calls for unsorted rows read."""
        self._kinds: dict[fx.Node, str] = {}
        """What the values of the region are, see `_kind`: the sorted `experts`, their `order`, `rows` in that order."""

    @property
    def exit(self) -> fx.Node:
        """The call that restores the order."""
        return self.region[-1]

    def read(self) -> None:
        """Find the region. Raise `Refused` if rows may depend on each other, or are read in sorted order."""
        self._read_choice()
        users = sorted(self._following())
        for node in users:
            kind = self._kind(node)
            self.region.append(node)
            if kind == "exit":
                break
            self._kinds[node] = kind
        else:
            raise Refused(Reason.MISSING, "the order of the rows is not restored", self.sort)
        early = min(self._reads, default=self.sort)
        if (write := find_write_between(early, self.exit)) is not None:
            raise Refused(Reason.MUTATION, f"{write} writes in place between {early} and {self.exit}", write)
        inside = {*self.region}
        for node in self.region[:-1]:
            for user in node.users:
                if user not in inside:
                    raise Refused(Reason.ANOTHER_CONSUMER, f"{user} reads {node}, which is sorted by expert", user)

    def _read_choice(self) -> None:
        given = dict(normalize_args(self.sort))
        flat = given["self"]
        choice = flat.args[0] if flat.target in _VIEWS else None
        if choice is None or choice.meta["val"].dim() != 2 or flat.meta["val"].dim() != 1:
            raise Refused(Reason.SHAPE, "what is sorted is not a flat view of [token, expert]", self.sort)
        if given["descending"]:
            raise Refused(Reason.CONSTANT, "the experts are sorted in descending order", self.sort)
        top = choice.args[0] if choice.target is operator.getitem and choice.args[1] == 1 else None
        if not isinstance(top, fx.Node) or top.target is not aten.topk.default:
            raise Refused(Reason.REFUSED, "the experts are not indices of a top-k, so they may not exist", self.sort)
        if dict(normalize_args(top))["dim"] != -1:
            raise Refused(Reason.AXIS, "the top-k is not over the last axis", top)
        self._reads.append(choice)
        self.choice, self.chosen = choice, choice.meta["val"].shape[1]
        self.experts = top.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
        if not (isinstance(self.chosen, int) and isinstance(self.experts, int) and self.experts <= _MOST_EXPERTS):
            raise Refused(Reason.SHAPE, f"the number of experts is not static, or above {_MOST_EXPERTS}", top)

    def _following(self) -> set[fx.Node]:
        """Return the sort, and what depends on it, up to what restores the order; and what the inverse is made of."""
        found, stack = {self.sort}, [self.sort]
        while stack:
            for user in stack.pop().users:
                if user not in found and user.op == "call_function":
                    found.add(user)
                    if not self._restores_order(user):
                        stack.append(user)
        numbers = {
            value
            for node in found
            if node.target is aten.index_put.default and isinstance(value := node.args[2], fx.Node)
            if value.target is aten.arange.default and len(value.users) == 1
        }
        return found | numbers

    def _restores_order(self, node: fx.Node) -> bool:
        """Whether a call selects rows by what looks like an inverse order."""
        if node.target is not aten.index.Tensor:
            return False
        indices: Any = node.args[1]
        return len(indices) == 1 and getattr(indices[0], "target", None) is aten.index_put.default

    def _kind(self, node: fx.Node) -> str:
        """Return what a call of the region computes, from what its operands are."""
        if node is self.sort:
            return "sort"
        kinds = self._kinds
        given = dict(normalize_args(node))
        source = given.get("self", given.get("input"))
        of = kinds.get(source, "") if isinstance(source, fx.Node) else ""
        target = node.target
        if target is operator.getitem and kinds.get(node.args[0]) == "sort":  # type: ignore[arg-type]
            return ("experts", "order")[node.args[1]]  # type: ignore[index]
        if target is aten._to_copy.default and of == "experts":
            self._require(given["dtype"] is torch.float32, node, Reason.DTYPE, "experts are not counted in float32")
            return "numbers of experts"
        if target is aten.histc.default and of == "numbers of experts":
            wanted = self.experts, 0, self.experts - 1
            text = f"the counts are not those of {self.experts} experts"
            self._require((given["bins"], given["min"], given["max"]) == wanted, node, Reason.CONSTANT, text)
            return "counts"
        if target is aten.cumsum.default and of == "counts":
            return "ends"
        if target is aten.floor_divide.default and of == "order":
            self._require(given["other"] == self.chosen, node, Reason.CONSTANT, "rows belong to other tokens")
            return "tokens"
        if target is aten.arange.default:
            return "count from 0"
        if target is aten.empty_like.default and of == "order":
            return "empty"
        if target is aten.index_put.default and of == "empty":
            return self._read_inverse(node, given)
        if target is aten.index.Tensor:
            return self._read_index(node, given, of)
        if target_text(target) in _GROUPED:
            return self._read_product(node, given)
        return self._read_row_wise(node, given)

    def _require(self, condition: bool, node: fx.Node, kind: Reason, text: str) -> None:
        if not condition:
            raise Refused(kind, text, node)

    def _read_inverse(self, node: fx.Node, given: dict[str, Any]) -> str:
        indices, values = given["indices"], given["values"]
        is_whole = (
            len(indices) == 1
            and self._kinds.get(indices[0]) == "order"
            and self._kinds.get(values) == "count from 0"
            and not given["accumulate"]
            and _is_equal(values.meta["val"].shape[0], indices[0].meta["val"].shape[0])
        )
        self._require(is_whole, node, Reason.REFUSED, "the inverse of the order is computed in another way")
        return "inverse"

    def _read_index(self, node: fx.Node, given: dict[str, Any], of: str) -> str:
        indices = given["indices"]
        self._require(len(indices) == 1, node, Reason.AXIS, "several axes are selected")
        by, source = self._kinds.get(indices[0]), given["self"]
        if of == "rows" and by == "inverse":
            sizes = source.meta["val"].shape[1:]
            is_static = all(isinstance(size, int) and size > 0 for size in sizes)
            self._require(is_static, node, Reason.SHAPE, "the size of a row is not static, or 0")
            return "exit"
        self._require(source not in self._kinds, node, Reason.EXTRA, "rows are selected in another way")
        if by == "order":
            flat = source.target in _VIEWS and source.args[0].meta["val"].dim() == 2 and source.meta["val"].dim() == 1
            same = flat and all(map(_is_equal, source.args[0].meta["val"].shape, self.choice.meta["val"].shape))
            self._require(same, node, Reason.SHAPE, f"{source} has no value for each token and expert")
            self._reads.append(source.args[0])
        elif by == "tokens":
            tokens = source.meta["val"].shape[0]
            same = _is_equal(tokens, self.choice.meta["val"].shape[0]) and source.meta["val"].dim() == 2
            self._require(same, node, Reason.SHAPE, f"{source} has not one row for each token")
        else:
            same = by == "experts" and _is_equal(source.meta["val"].shape[0], self.experts)
            same = same and source.meta["val"].dim() == 2
            self._require(same, node, Reason.SHAPE, f"{source} is not selected by token or by expert")
        return "rows"

    def _read_product(self, node: fx.Node, given: dict[str, Any]) -> str:
        rows, weight, ends = _product_operands(node)
        plain = given.get("bias") is None and given.get("out_dtype") in (None, node.meta["val"].dtype)
        self._require(plain, node, Reason.EXTRA, "the product has a bias or another dtype")
        is_known = self._kinds.get(rows) == "rows" and self._kinds.get(ends) == "ends" and weight not in self._kinds
        self._require(is_known, node, Reason.REFUSED, "rows, weights or counts of the product are not those of experts")
        ranks = rows.meta["val"].dim(), weight.meta["val"].dim()
        self._require(ranks == (2, 3), node, Reason.SHAPE, "the product is not of rows with a matrix for each expert")
        types = {rows.meta["val"].dtype, weight.meta["val"].dtype}
        self._require(
            types <= {*_DTYPES}, node, Reason.DTYPE, "rows or weights are not in float32, bfloat16 or float16"
        )
        same = _is_equal(weight.meta["val"].shape[0], self.experts)
        self._require(same, node, Reason.SHAPE, f"the weight has not one part for each of {self.experts} experts")
        return "rows"

    def _read_row_wise(self, node: fx.Node, given: dict[str, Any]) -> str:
        """A call that computes each row from the same row of its operands, and from values that all rows share."""
        name = target_text(node.target)
        operands = [each for each in node.all_input_nodes if each in self._kinds]
        known = node.target in _ROW_WISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
        is_known = known and all(self._kinds[each] == "rows" for each in operands)
        self._require(is_known, node, Reason.EXTRA, f"{name} may combine rows of several experts")
        is_plain = given.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
        self._require(is_plain, node, Reason.EXTRA, f"{name} states a memory format")
        if node.target is operator.getitem:
            return "rows"
        ranks = {value.dim() if isinstance(value := each.meta["val"], Tensor) else 0 for each in operands}
        self._require(len(ranks) == 1 and 0 not in ranks, node, Reason.SHAPE, f"{name} reads values of several ranks")
        rank = ranks.pop()
        first = -rank - (node.target is aten.unsqueeze.default)
        self._require(given.get("dim") != first, node, Reason.AXIS, f"{name} works along the rows")
        for each in node.all_input_nodes:
            if each not in self._kinds and isinstance(each.meta["val"], Tensor):
                value = each.meta["val"]
                shared = value.dim() < rank or (value.dim() == rank and _is_equal(value.shape[0], 1))
                self._require(shared, node, Reason.SHAPE, f"{each} may differ between rows")
        return "rows"

    def write(self, rewriter: Rewriter) -> fx.Node:
        """Insert the calls for rows that are not sorted: `[token, chosen, …]` instead of `[row, …]`."""
        made: dict[fx.Node, Any] = {}
        for node in self.region[:-1]:
            if self._kinds[node] == "rows":
                made[node] = self._write_call(rewriter, node, made)
        result = made[self.exit.args[0]]  # type: ignore[index]
        return rewriter.call(aten.reshape.default, (result, [-1, *self.exit.meta["val"].shape[1:]]))

    def _write_call(self, rewriter: Rewriter, node: fx.Node, made: dict[fx.Node, Any]) -> fx.Node:
        given: dict[str, Any] = dict(normalize_args(node))
        if node.target is aten.index.Tensor:
            source, by = given["self"], self._kinds[given["indices"][0]]
            if by == "order":
                before: fx.Node = source.args[0]
                return before
            if by == "tokens":
                return rewriter.call(aten.unsqueeze.default, (source, 1), origin=node)
            return rewriter.call(aten.embedding.default, (source, self.choice), origin=node)
        if target_text(node.target) in _GROUPED:
            rows, weight, _ = _product_operands(node)
            if weight.target is aten.transpose.int and {weight.args[1], weight.args[2]} in ({-1, -2}, {1, 2}):
                weight = weight.args[0]
            else:
                weight = rewriter.call(aten.transpose.int, (weight, -2, -1), origin=node)
            operands = made[rows], self.choice, weight
            return rewriter.call(torch.ops.inlay.expert_linear.default, operands, origin=node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: made.get(each, each))
        if "dim" in kwargs:
            kwargs = {**kwargs, "dim": given["dim"]}
        elif given.get("dim") is not None:  # from the end: there is one axis more
            place = list(given).index("dim")
            args = (*args[:place], given["dim"], *args[place + 1 :])
        return rewriter.call(node.target, args, kwargs, origin=node)


def _weights() -> tuple[Tensor, Tensor, Tensor]:
    import transformers.integrations.moe  # noqa: F401 - registers the operator, which must not happen while tracing

    return torch.randn(4, 8), torch.randn(4, 16, 8), torch.randn(4, 8, 8)


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    result: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    return result


def _experts(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
    between: Any = lambda rows: rows,
    product: Any = _grouped,
    restore: Any = None,
    divisor: int = 2,
    descending: bool = False,
) -> tuple[Tensor, Tensor]:
    """Two of four experts for each token, as transformers computes them; and the rows in sorted order."""
    weights, choice = torch.topk(torch.nn.functional.linear(x, router).softmax(-1), 2)
    experts, order = choice.view(-1).sort(descending=descending)
    ends = torch.histc(experts.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
    rows = product(x[(order // divisor)], gate_up.transpose(-2, -1), ends)
    rows = rows if biases is None else rows + biases[0][experts]
    gate, up = between(rows).chunk(2, -1)
    rows = product(torch.nn.functional.silu(gate) * up, down.transpose(-2, -1), ends)
    rows = rows if biases is None else rows + biases[1][experts]
    rows = rows * weights.view(-1)[order].unsqueeze(-1)
    if restore is not None:
        return restore(rows, order).view(-1, 2, 8).sum(1), rows
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return rows[inverse].view(-1, 2, 8).sum(1), rows


def _routed(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return _experts(x, router, gate_up, down)[0]


def _in_bfloat16(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return _experts(x, router, gate_up, down, product=torch._grouped_mm)[0]


def _biased(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return _experts(x, router, gate_up, down, (first, second))[0]
