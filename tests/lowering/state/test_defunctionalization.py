"""fix_functionalization on graphs: what goes in place, what stays, why, and the same numbers and state afterwards."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from tools.fuzz_writes.__main__ import run
from tools.fuzz_writes.check import check, reduce_graph
from tools.fuzz_writes.grow import generate_graph
from torch import fx

from inlay.analysis.auto_functionalized import V2, is_auto_functionalized
from inlay.analysis.liveness import CopyReason, WriteLiveness
from inlay.lowering.state.defunctionalization import expand_auto_functionalized, fix_functionalization
from tests.in_place_graphs import FIRES, Build, Case, fuzz
from tests.refused_graphs import STAYS

aten = torch.ops.aten


def _name(case: Case) -> str:
    return case.build.__name__


def _targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.fast
@pytest.mark.parametrize("case", FIRES.values(), ids=_name)
def test_fires(case: Case) -> None:
    build = Build()
    module = case.build(build)
    assert check(module, build.inputs) == ""
    fixed = fix_functionalization(module.graph)
    assert (len(fixed.in_place), fixed.copied) == (case.in_place, ())
    targets = _targets(module)
    assert not any(map(is_auto_functionalized, module.graph.nodes))
    assert targets.count(aten.copy_.default) == case.copies_left
    assert sum(getattr(each, "namespace", "") == "inlay_fuzz" for each in targets) >= 1
    assert targets.count(aten.clone.default) == (_name(case) == "a_clone_and_its_origin")


@pytest.mark.fast
@pytest.mark.parametrize("case", STAYS.values(), ids=_name)
def test_stays(case: Case) -> None:
    build = Build()
    module = case.build(build)
    assert check(module, build.inputs) == ""
    before = _targets(module)
    fixed = fix_functionalization(module.graph)
    assert fixed.in_place == ()
    assert tuple(each.copy_required.reason for each in fixed.copied if each.copy_required) == case.stays
    assert _targets(module) == before, "what stays is left as it was"
    assert before.count(aten.copy_.default) == case.copies_left


@pytest.mark.fast
@pytest.mark.parametrize("case", STAYS.values(), ids=_name)
def test_what_stays_is_spelled_out_as_copies(case: Case) -> None:
    module = case.build(Build())
    wrappers = sum(map(is_auto_functionalized, module.graph.nodes))
    assert expand_auto_functionalized(module.graph) == wrappers
    copies = [each for each in _targets(module) if each in (aten.clone.default, aten.new_empty_strided.default)]
    if case.stays != (CopyReason.OPAQUE,):
        assert not any(map(is_auto_functionalized, module.graph.nodes))
        assert len(copies) == len(case.stays)


@pytest.mark.fast
def test_one_write_of_a_call_goes_and_one_stays() -> None:
    g = Build()
    x, y = g.input("x", 2, 4), g.input("y", 4)
    own = g(aten.mul.Tensor, x, 2)
    call = g(V2, fuzz.two.default, y=y, _x_base_index=0, _z_base_index=1, _all_bases=[own, x])
    module = g.module(g.item(call, 0), g.item(call, 1), g.item(call, 2))
    assert check(module, g.inputs) == ""
    fixed = fix_functionalization(module.graph)
    assert [write.base for write in fixed.in_place] == ["mul_tensor"]
    (stayed,) = fixed.copied
    assert stayed.base == "x"
    assert stayed.copy_required is not None
    assert stayed.copy_required == (CopyReason.NOT_COPIED_BACK, "x")
    assert stayed.nbytes == 8 * 8
    assert str(stayed) == (
        "inlay_fuzz.two.default writes a copy of x: it is an input or a constant that the program does not change (x)"
    )
    (called,) = module.graph.find_nodes(op="call_function", target=fuzz.two.default)
    assert [each.name for each in called.args] == ["mul_tensor", "y", "clone_default"]


@pytest.mark.fast
def test_the_clone_is_written_and_not_its_origin() -> None:
    """pytorch#198031"""
    from tests.in_place_graphs import a_clone_and_its_origin

    module = a_clone_and_its_origin(Build())
    fix_functionalization(module.graph)
    (called,) = module.graph.find_nodes(op="call_function", target=fuzz.put.default)
    assert [each.name for each in called.args] == ["clone_default", "x"]


@pytest.mark.fast
def test_new_nodes_say_what_they_are() -> None:
    g = Build()
    x, y = g.input("x", 4, 4), g.input("y", 4)
    new = g.put(x, y, slice_dim=0, slice_start=1, slice_end=3)
    row = g(aten.select.int, new, 0, 2)
    g.back(x, new)
    module = g.module(g(aten.add.Tensor, row, 1))
    fix_functionalization(module.graph)
    storage = x.meta["val"].untyped_storage().data_ptr()
    (part,) = module.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    (called,) = module.graph.find_nodes(op="call_function", target=fuzz.put.default)
    assert tuple(part.meta["val"].shape) == (2, 4)
    assert called.meta["val"] is None
    assert {each.meta["val"].untyped_storage().data_ptr() for each in (part, row)} == {storage}


@pytest.mark.fast
def test_an_input_with_gaps_is_written_only_where_it_is() -> None:
    """The caller's tensor is every second column of something; a view told by strides would reach between them."""
    g = Build()
    x, y = g.input("x", 2, 4), g.input("y", 4)
    whole = torch.arange(16).reshape(2, 8)
    g.inputs["x"], x.meta["val"] = whole[:, ::2], whole.clone()[:, ::2]
    g.back(x, g.put(x, y, size=(4,), stride=(1,), storage_offset=0))
    module = g.module()
    assert check(module, g.inputs) == ""
    fixed = fix_functionalization(module.graph)
    assert [each.copy_required for each in fixed.copied] == [(CopyReason.UNKNOWN, "x")]


@pytest.mark.fast
@pytest.mark.parametrize("shared", [False, True])
def test_two_inputs_in_one_storage(shared: bool) -> None:
    """Which of them the caller sees change is not known."""
    g = Build()
    x, y, z = g.input("x", 4), g.input("y", 4), g.input("z", 4)
    if shared:
        z.meta["val"] = x.meta["val"].view(4)
    g.back(x, g.put(x, y))
    fixed = fix_functionalization(g.module(g(aten.add.Tensor, z, 1)).graph)
    assert [each.copy_required for each in fixed.copied] == ([(CopyReason.UNKNOWN, "x")] if shared else [])


@pytest.mark.fast
@pytest.mark.parametrize("direct", [True, False])
def test_values_that_are_not_stated(direct: bool) -> None:
    """Nothing says how a new value lies in memory: it may be copied back itself, and no view of it."""
    g = Build()
    x, y = g.input("x", 2, 4), g.input("y", 4)
    new = g.put(x, y)
    view = new if direct else g(aten.view.default, new, [2, 4])
    g.back(x, view)
    module = g.module()
    for each in {new, view}:
        del each.meta["val"]
    fixed = fix_functionalization(module.graph)
    stays = [] if direct else [(CopyReason.OVERWRITTEN, "copy__default")]
    assert [each.copy_required for each in fixed.copied] == stays


@pytest.mark.fast
def test_symbolic_sizes() -> None:
    """Sizes that are not numbers: no bytes are told, whole tensors go in place, and nothing is guarded on."""
    from inlay.program import Symbol
    from inlay.program.symbols import FakeValues

    fakes = FakeValues([Symbol("rows", 1, None, 4)])
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = (fakes.tensor(torch.int64, ("rows", 4)) for _ in range(2))
    calls = [
        graph.call_function(V2, (fuzz.put.default,), {"y": each, "_x_base_index": 0, "_all_bases": [x]})
        for each in (y, x)
    ]
    with fakes.mode:
        for call in calls:
            call.meta["val"] = (None, x.meta["val"].clone())
    news = []
    for call in calls:
        news.append(graph.call_function(operator.getitem, (call, 1)))
        news[-1].meta["val"] = call.meta["val"][1]
    graph.call_function(aten.copy_.default, (x, news[0])).meta["val"] = x.meta["val"]
    read = graph.call_function(aten.add.Tensor, (news[1], 1))
    graph.output((read,))
    fixed = fix_functionalization(graph)
    assert [each.copy_required for each in fixed.in_place] == []
    assert [(each.copy_required.reason, each.nbytes) for each in fixed.copied if each.copy_required] == [
        (CopyReason.READ_AFTER_WRITE, None),
        (CopyReason.SHARED_STORAGE, None),
    ]
    expand_auto_functionalized(graph)
    assert [node.target for node in graph.nodes].count(aten.clone.default) == 2
    graph.lint()


def _assert_sound(report: dict[str, Any], graphs: int, fired: int, each: int) -> None:
    assert report["failures"] == []
    assert report["graphs"] >= graphs
    assert report["in place"] >= fired
    assert report["copies removed"] >= fired // 4
    stayed = {
        reason: report["stayed"].get(str(reason), 0)
        for reason in set(CopyReason) - {CopyReason.OPAQUE, CopyReason.REORDERED_CALLS}
    }
    assert {reason: count for reason, count in stayed.items() if count < each} == {}


@pytest.mark.fast
def test_three_hundred_random_graphs() -> None:
    _assert_sound(run(300, 0), graphs=270, fired=250, each=1)


@pytest.mark.nightly
def test_forty_thousand_random_graphs() -> None:
    _assert_sound(run(45_000, 1), graphs=40_000, fired=45_000, each=200)


@pytest.mark.fast
@pytest.mark.parametrize(
    "reason",
    [
        CopyReason.READ_AFTER_WRITE,
        CopyReason.SHARED_STORAGE,
        CopyReason.NOT_COPIED_BACK,
        CopyReason.RETURNED,
        CopyReason.OVERWRITTEN,
        CopyReason.UNKNOWN,
    ],
)
def test_the_fuzzer_notices_when_a_reason_is_ignored(reason: CopyReason, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = WriteLiveness.copy_required

    def refusal(self: WriteLiveness) -> Any:
        found = honest(self)
        return None if found is not None and found.reason is reason else found

    monkeypatch.setattr(WriteLiveness, "copy_required", refusal)
    for index in range(400):
        module, inputs = generate_graph(random.Random(f"5/{index}"))
        if check(module, inputs):
            break
    else:
        pytest.fail(f"400 graphs, and nobody missed: {reason}")
    small = reduce_graph(module, inputs)
    assert check(small, inputs)
    assert len(_targets(small)) <= len(_targets(module))


@pytest.mark.fast
def test_the_same_seed_grows_the_same_graph() -> None:
    one, two = (generate_graph(random.Random("1/2")) for _ in range(2))
    assert str(one[0].graph) == str(two[0].graph)
    assert all(torch.equal(value, two[1][name]) for name, value in one[1].items())
