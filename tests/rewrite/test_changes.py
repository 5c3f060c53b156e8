"""The rewriter: types, provenance, listeners, refusals; and that no transform changes a graph in another way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, fx

from inlay.errors import ProgramError, TransformError
from inlay.program.graphs import MODULE, ORIGIN, SOURCE, all_graphs, all_nodes
from inlay.program.text.printer import dump
from inlay.rewrite import Match, Reason, Refusal, Refused, Rewriter
from inlay.rewrite.rewriter import layout_text
from inlay.testing import program_of
from inlay.transforms import Case, LocalTransform, Numerics, ProgramTransform, Stage, registry
from inlay.transforms.base import find_transform

if TYPE_CHECKING:
    from inlay.program import Program

aten = torch.ops.aten
pytestmark = pytest.mark.fast
CASES = [(name, case) for name, cls in registry().items() for case in (*cls.positive_cases(), *cls.negative_cases())]


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, fx.Node]] = []
        self.replacements: dict[fx.Node, fx.Node] = {}

    def inserted(self, node: fx.Node) -> None:
        self.events.append(("inserted", node))

    def replaced(self, old: fx.Node, new: fx.Node) -> None:
        self.replacements[old] = new

    def changed(self, node: fx.Node) -> None:
        self.events.append(("changed", node))

    def erased(self, node: fx.Node) -> None:
        assert not node.users
        self.events.append(("erased", node))


class ReluToTanh(LocalTransform):
    """Each relu becomes a tanh, which is wrong, and the right type; those of no elements are refused."""

    name, stage, numerics = "relu_to_tanh", Stage.CLEAN, Numerics.APPROXIMATE

    def match(self, node: fx.Node) -> Match | Refusal | None:
        if node.target is not aten.relu.default:
            return None
        if not node.meta["val"].numel():
            return Refusal(node, node, Reason.SHAPE, "there are no elements")
        return Match.at(node)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        with rewriter.inserting_before(match.root, match.root):
            made = rewriter.call(aten.tanh.default, match.root.args)
        rewriter.replace(match.root, made)
        rewriter.erase(match.root)


def _node(program: Program, target: Any) -> fx.Node:
    return next(node for node in program.graph.nodes if node.target is target)


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda each: each.name if isinstance(each, Case) else each)
def test_every_change_is_told(name: str, case: Case) -> None:
    """What a listener heard accounts for every node that came, went or was changed; new calls have type and source."""
    program = program_of(case.function, case.args, case.axes, case.prerequisites).copy()
    listener, transform = Listener(), find_transform(name)()
    transform.listeners.append(listener)
    before = {node: _content(node) for node in all_nodes(program.graph)}
    text, applied = dump(program), transform.apply(program)
    after = {*all_nodes(applied.program.graph)}
    if after.isdisjoint(before):  # all or none, and it was none: a copy that was made before
        assert dump(applied.program) == text
        return
    heard = {event: [node for what, node in listener.events if what == event] for event in ("inserted", "erased")}
    assert {*before, *heard["inserted"]} - {*heard["erased"]} == after
    changed = {node for what, node in listener.events if what == "changed"}

    def current(node: fx.Node) -> fx.Node:
        return current(listener.replacements[node]) if node in listener.replacements else node

    for node in after & before.keys() - changed:
        target, operands, meta = before[node]
        assert _content(node) == (target, fx.map_arg(operands, current), meta), node
    for _, graph in all_graphs(applied.program.graph):
        assert list(graph.nodes) == list(reversed(graph.nodes))[::-1], "a node stands behind one that was erased"
    for node in after - before.keys():
        assert "val" in node.meta, node
        # What all layers share, such as the positions of a cache, comes from no single node.
        assert ORIGIN in node.meta or transform.adds_inputs or node.op == "placeholder", node


def _content(node: fx.Node) -> tuple[Any, Any, Any]:
    """What a node calls, what it reads, and what is known of it."""
    value = node.meta.get("val")
    known = {key: each for key, each in node.meta.items() if key in (SOURCE, MODULE, ORIGIN)}
    return node.target, (node.args, dict(node.kwargs)), (known, layout_text(value))


def test_a_call_has_the_type_and_the_place_of_what_it_replaces() -> None:
    program = program_of(lambda x: x.relu() + 1, [torch.randn(2, 3)])
    relu = _node(program, aten.relu.default)
    relu.meta |= {SOURCE: "model.py:7", MODULE: "layers.3"}
    applied = ReluToTanh().apply(program)
    tanh = _node(applied.program, aten.tanh.default)
    assert (tanh.meta[SOURCE], tanh.meta[MODULE]) == ("model.py:7", "layers.3")
    assert tanh.meta["val"].shape == (2, 3)
    assert (applied.sites, applied.matched_roots, applied.misses) == (1, ["relu"], [])


def test_what_is_refused_is_told_with_its_kind() -> None:
    applied = ReluToTanh().apply(program_of(lambda x: x.relu() + 1, [torch.randn(0, 3)]))
    (refusal,) = applied.misses
    assert (refusal.kind, refusal.reason) == (Reason.SHAPE, "shape: there are no elements")
    assert not refusal.is_mismatch


def test_sites_that_are_left_out_stay() -> None:
    program = program_of(lambda x: x.relu().neg().relu(), [torch.randn(3)])
    transform = ReluToTanh()
    transform.site_filter = lambda node: node.name == "relu_1"
    applied = transform.apply(program)
    assert applied.program.op_counts() == {"aten.relu.default": 1, "aten.neg.default": 1, "aten.tanh.default": 1}
    assert applied.matched_roots == ["relu_1"]


@pytest.mark.parametrize(
    ("target", "more"), [(aten._to_copy.default, {"dtype": torch.float64}), (aten.squeeze.default, {})]
)
def test_a_value_of_another_type_is_refused_and_taken_back(target: Any, more: dict[str, Any]) -> None:
    class Wrong(ReluToTanh):
        def rewrite(self, match: Match, rewriter: Rewriter) -> None:
            with rewriter.inserting_before(match.root):
                made = rewriter.call(target, match.root.args, more)
            rewriter.replace(match.root, made)

    program = program_of(lambda x: x.relu() + 1, [torch.randn(2, 1)])
    before = dump(program)
    applied = Wrong().apply(program)
    assert dump(applied.program) == before
    assert [each.kind for each in applied.misses] == [Reason.REPLACEMENT]
    assert not applied.sites


def test_a_layout_that_moved_is_followed() -> None:
    """A transposed product is not contiguous: what views it gets a copy, and what is returned lies as it did."""

    class Turned(LocalTransform):
        stage, numerics = Stage.CLEAN, Numerics.ROUNDING

        def match(self, node: fx.Node) -> Match | None:
            return Match.at(node) if node.target is aten.relu.default else None

        def rewrite(self, match: Match, rewriter: Rewriter) -> None:
            with rewriter.inserting_before(match.root, match.root):
                turned = rewriter.call(aten.transpose.int, (match.root.args[0], 0, 1))
                whole = rewriter.call(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
                again = rewriter.call(aten.transpose.int, (rewriter.call(aten.relu.default, (whole,)), 0, 1))
            rewriter.replace(match.root, again)
            rewriter.erase(match.root)

    def viewed(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.relu()
        return y.view(-1), y + 1

    x = torch.randn(4, 5)
    program = program_of(viewed, [x])
    transform = Turned()
    seen: list[fx.Node] = []
    transform.site_filter = lambda node: not seen and not seen.append(node)  # type: ignore[func-returns-value]
    applied = transform.apply(program.copy())
    one, two = program.module()(x), applied.program.module()(x)
    for left, right in zip(one, two, strict=True):
        assert torch.equal(left, right)
        assert left.stride() == right.stride()
    assert applied.sites == 1


def test_a_node_that_is_read_cannot_be_erased() -> None:
    program = program_of(lambda x: x.relu() + 1, [torch.randn(3)])
    with pytest.raises(ProgramError, match="relu is still read by add"):
        Rewriter(program).erase(_node(program, aten.relu.default))


def test_a_match_that_was_planned_sees_what_became_of_its_operands() -> None:
    class Planned(ProgramTransform):
        stage, numerics = Stage.CLEAN, Numerics.APPROXIMATE

        def plan(self, program: Program) -> list[Match]:
            return [Match.at(node, x=node.args[0]) for node in program.graph.nodes if node.target is aten.relu.default]

        def rewrite(self, match: Match, rewriter: Rewriter) -> None:
            with rewriter.inserting_before(match.root, match.root):
                made = rewriter.call(aten.tanh.default, (match.values["x"],))
            rewriter.replace(match.root, made)
            rewriter.erase(match.root)

    applied = Planned().apply(program_of(lambda x: x.relu().relu().relu(), [torch.randn(3)]))
    assert applied.program.op_counts() == {"aten.tanh.default": 3}
    x = torch.randn(3)
    assert torch.equal(applied.program.module()(x), x.tanh().tanh().tanh())


def test_all_or_none() -> None:
    class Atomic(ReluToTanh):
        is_atomic = True

        def rewrite(self, match: Match, rewriter: Rewriter) -> None:
            if match.root.name == "relu_1":
                raise Refused(Reason.REFUSED, "not the second")
            super().rewrite(match, rewriter)

    program = program_of(lambda x: x.relu().neg().relu(), [torch.randn(3)])
    before = dump(program)
    applied = Atomic().apply(program)
    assert (applied.sites, applied.matched_roots, dump(applied.program)) == (0, [], before)
    assert [each.reason for each in applied.misses] == ["refused: not the second"]


def test_what_is_refused_leaves_nothing_behind() -> None:
    """Types, bindings and a call that cannot be computed are taken back."""

    class Half(ReluToTanh):
        def rewrite(self, match: Match, rewriter: Rewriter) -> None:
            (x,) = match.root.all_input_nodes
            rewriter.retype(x, rewriter.fakes.tensor(torch.uint8, (9,)))
            rewriter.update(name="another")
            with rewriter.inserting_before(match.root), pytest.raises(ProgramError):
                rewriter.call(aten.view.default, (x, [7, 7]))
            raise Refused(Reason.REFUSED, "after all")

    program = program_of(lambda x: x.relu() + 1, [torch.randn(2, 3)])
    before = dump(program)
    applied = Half().apply(program)
    assert (dump(applied.program), applied.program.name) == (before, program.name)
    assert [each.reason for each in applied.misses] == ["refused: after all"]


def test_a_refusal_after_a_replacement_is_an_error() -> None:
    class Late(ReluToTanh):
        def rewrite(self, match: Match, rewriter: Rewriter) -> None:
            super().rewrite(match, rewriter)
            raise Refused(Reason.REFUSED, "too late")

    with pytest.raises(ProgramError, match="refused after one of its values had been replaced"):
        Late().apply(program_of(lambda x: x.relu() + 1, [torch.randn(2, 3)]))


def test_of_two_matches_that_share_a_node_the_first_is_rewritten() -> None:
    class Twice(ProgramTransform):
        stage, numerics = Stage.CLEAN, Numerics.APPROXIMATE

        def plan(self, program: Program) -> list[Match]:
            return [Match.at(_node(program, aten.relu.default)), Match.at(_node(program, aten.relu.default))]

        def rewrite(self, match: Match, rewriter: Rewriter) -> None:
            ReluToTanh().rewrite(match, rewriter)

    applied = Twice().apply(program_of(lambda x: x.relu() + 1, [torch.randn(3)]))
    assert applied.sites == 1
    assert [each.kind for each in applied.misses] == [Reason.OVERLAP]


def test_a_transform_does_not_see_what_it_inserts() -> None:
    class Again(ReluToTanh):
        def rewrite(self, match: Match, rewriter: Rewriter) -> None:
            with rewriter.inserting_before(match.root.next, match.root):
                made = rewriter.call(aten.relu.default, (match.root,))
            rewriter.replace(match.root, made)

    applied = Again().apply(program_of(lambda x: x.relu() + 1, [torch.randn(3)]))
    assert applied.program.op_counts()["aten.relu.default"] == 2
    assert applied.sites == 1


def test_nothing_is_inserted_before_an_erased_node() -> None:
    program = program_of(lambda x: x.relu() + 1, [torch.randn(3)])
    rewriter, (relu, add) = Rewriter(program), (node for node in program.graph.nodes if node.op == "call_function")
    rewriter.set_outputs(program.graph, [relu])
    rewriter.erase(add)
    with pytest.raises(ProgramError, match="add was erased"), rewriter.inserting_before(add):
        pass


class Specializes(LocalTransform):
    name = "specializes"
    stage, numerics = Stage.FUSE, Numerics.EXACT

    def match(self, node: fx.Node) -> Match | Refusal | None:
        return Match.at(node) if node.target is aten.relu.default and int(node.meta["val"].shape[0]) == 4 else None

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        raise AssertionError("no place is found")


def test_a_size_that_is_taken_for_a_number() -> None:
    """torch then takes it for one everywhere in the program."""
    program = program_of(lambda x: x.relu(), [torch.ones(3)], axes={"x": {0: "length"}})
    for _ in range(2):  # what torch takes it for is kept beside all copies of the program
        with pytest.raises(TransformError, match="specializes assumed that length is 3, but these sizes are dynamic"):
            Specializes().apply(program.copy())
