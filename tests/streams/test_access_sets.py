"""What programs and plans touch: views, in-place writes, state, several results, random numbers, collectives."""

from __future__ import annotations

import operator
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from inlay.errors import ProgramError, UsageError
from inlay.frontend import capture
from inlay.program import Binding, Bindings, Facts, Program, Role
from inlay.program.graphs import attach_subgraphs
from inlay.program.program import CallSpec
from inlay.streams import (
    ConflictKind,
    Event,
    Lifetime,
    Schedule,
    WorkGraph,
    build_work,
    check_schedule,
    measure_calls,
    measure_event,
    plan_schedule,
    serial_schedule,
)
from inlay.testing import program_of
from tests.models import branch
from tests.streams.interleavings import any_order, calls_of, run_calls
from tests.streams.random_programs import INPUTS, SIZE, random_program

pytestmark = pytest.mark.fast
aten = torch.ops.aten


def _touched(work: WorkGraph) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    return {task.name: (task.reads, task.writes) for task in work.tasks}


def _graph(*inputs: str) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    return graph, [graph.placeholder(name) for name in inputs]


def _program(graph: fx.Graph, *results: fx.Node) -> Program:
    graph.output(results)
    ins = [
        Binding(node.name, Role.INPUT, node.name, "float32", (4,)) for node in graph.nodes if node.op == "placeholder"
    ]
    outs = [Binding(f"out{place}", Role.OUTPUT, "", "float32", (4,)) for place, _ in enumerate(results)]
    return Program("made", graph, Bindings((*ins, *outs)), {}, {}, CallSpec(None, None, ()), Facts())


def test_state_and_its_new_value_are_one_storage() -> None:
    def step(x: torch.Tensor, cache: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, count, x)
        seen = cache.sum(0)
        count.add_(1)
        return seen

    program = program_of(step, [torch.ones(1, 4), torch.zeros(8, 4), torch.zeros(1, dtype=torch.int64)])
    work = build_work(program)
    assert _touched(work) == {
        "index_copy": (("values_1", "values_2", "values_0"), ("values_1",)),
        "sum_1": (("values_1",), ("sum_1",)),
        "add": (("values_2",), ("values_2",)),
    }
    lives = {each.name: each.lifetime for each in work.storages}
    assert lives == {
        "values_0": Lifetime.INPUT,
        "values_1": Lifetime.STATE,
        "values_2": Lifetime.STATE,
        "sum_1": Lifetime.RESULT,
    }
    assert work.storage_by_name["values_1"].values == ("values_1", "index_copy")


def test_views_touch_no_memory() -> None:
    """A write may come before or after a view is made; whoever takes the view waits for both."""
    graph, (x,) = _graph("x")
    x.meta["val"] = torch.ones(4, 4)
    made = graph.call_function(aten.relu.default, (x,))
    made.meta["val"] = torch.ones(4, 4)
    view = graph.call_function(aten.t.default, (made,))
    view.meta["val"] = made.meta["val"].t()
    over = graph.call_function(aten.mul_.Scalar, (made, 2))
    over.meta["val"] = made.meta["val"]
    read = graph.call_function(aten.neg.default, (view,))
    work = build_work(_program(graph, read))
    assert _touched(work) == {
        "relu_default": (("x",), ("relu_default", "relu_default:handle")),
        "t_default": (("relu_default:handle",), ("t_default",)),
        "mul__scalar": (("relu_default",), ("relu_default",)),
        "neg_default": (("relu_default", "t_default"), ("neg_default",)),
    }
    assert work.storage_by_name["t_default"].nbytes == 0
    assert work.storage_by_name["relu_default"].nbytes == 64


def test_a_view_that_may_be_a_copy_has_memory_of_its_own() -> None:
    graph, (x,) = _graph("x")
    made = graph.call_function(aten.relu.default, (x,))
    shaped = graph.call_function(aten.reshape.default, (made, [2, 2]))
    read = graph.call_function(aten.neg.default, (shaped,))
    work = build_work(_program(graph, read))
    assert _touched(work)["neg_default"][0] == ("relu_default", "reshape_default")
    assert work.storage_by_name["reshape_default"].nbytes is None


def test_a_view_when_it_was_traced_may_be_a_copy_when_it_is_run() -> None:
    """What is given may lie otherwise than the example did: the copy reads it, and a write must wait for that."""
    graph, (x,) = _graph("x")
    x.meta["val"] = torch.ones(2, 2)
    shaped = graph.call_function(aten.reshape.default, (x, [4]))
    shaped.meta["val"] = x.meta["val"].reshape(4)
    over = graph.call_function(aten.mul_.Scalar, (x, 2))
    read = graph.call_function(aten.neg.default, (shaped,))
    work = build_work(_program(graph, read))
    assert "x" in work[shaped.name].reads
    made = Schedule(((shaped.name,), (over.name, read.name)), (Event(shaped.name, read.name),))
    assert [(race.first, race.second) for race in check_schedule(work, made).races] == [(shaped.name, over.name)]


@pytest.mark.parametrize("look", [aten.select.int, aten.sym_size.int])
def test_who_looks_at_a_tensor_waits_for_what_changes_its_sizes(look: Any) -> None:
    graph, (x,) = _graph("x")
    x.meta["val"] = torch.ones(4, 2)
    made = graph.call_function(aten.relu.default, (x,))
    made.meta["val"] = torch.ones(4, 2)
    turned = graph.call_function(aten.t_.default, (made,))
    turned.meta["val"] = made.meta["val"].t()
    seen = graph.call_function(look, (made, 0, 0)[: len(look._schema.arguments)])
    seen.meta["val"] = look(turned.meta["val"], 0, *(0,) * (look is aten.select.int))
    work = build_work(_program(graph, seen))
    assert set(work[seen.name].reads) & set(work[turned.name].writes)


def _nobody_knows(*values: Any) -> Any:
    """A call of no schema."""


@pytest.mark.parametrize("with_input", [False, True])
@pytest.mark.parametrize("last", ["reads", "is returned"])
@pytest.mark.parametrize("target", [aten.reshape.default, _nobody_knows])
@pytest.mark.parametrize("maker", [aten.relu.default, aten.topk.default])
def test_what_may_be_a_copy_keeps_nothing_alive(maker: Any, target: Any, last: str, with_input: bool) -> None:
    """The memory of what was copied may be given to another task while it is copied."""
    graph, (x,) = _graph("x")
    made = task = graph.call_function(maker, (x, 4)[: 1 + (maker is aten.topk.default)])
    if task.target is aten.topk.default:
        made = graph.call_function(operator.getitem, (task, 0))
    more = ([4],) if target is aten.reshape.default else (x,) * with_input
    kept = graph.call_function(target, (made, *more))
    other = graph.call_function(aten.ones.default, ([4],))
    end = graph.call_function(aten.neg.default, (kept,)) if last == "reads" else kept
    work = build_work(_program(graph, end, other))
    events = {Event(task.name, kept.name), Event(kept.name, end.name)} - {Event(kept.name, kept.name)}
    lane = (task.name, other.name, end.name)[: 3 if last == "reads" else 2]
    apart = Schedule((lane, (kept.name,)), tuple(events))
    found = [(race.kind, race.first, race.second, race.storage) for race in check_schedule(work, apart).races]
    assert found == [(ConflictKind.REUSE, kept.name, other.name, made.name)]
    assert check_schedule(work, replace(apart, recorded_storages=(made.name,))).ok


def test_several_results_are_several_storages() -> None:
    program = program_of(lambda x: x.topk(2), [torch.ones(2, 4)])
    work = build_work(program)
    (task,) = work.tasks
    assert task.calls == ("topk", "getitem", "getitem_1")
    assert {"getitem", "getitem_1"} <= set(task.writes)
    assert work.storage_by_name["getitem"].lifetime is work.storage_by_name["getitem_1"].lifetime is Lifetime.RESULT


@pytest.mark.parametrize(
    "silent",
    [
        lambda graph, x: graph.call_function(operator.setitem, (x, 0, 1.0)),
        lambda graph, x: graph.call_function(aten.native_batch_norm.default, (x, None, None, x, x, True, 0.1, 1e-5)),
        lambda graph, x: graph.call_function(
            aten.add_.Tensor, (graph.call_function(aten.dropout.default, (x, 0.5, False)), 1)
        ),
        lambda graph, x: graph.call_function(
            aten.add_.Tensor,
            (graph.call_function(operator.getitem, (graph.call_function(aten.unsafe_split.Tensor, (x, 2)), 0)), 1),
        ),
        lambda graph, x: graph.call_function(
            aten.add_.Tensor,
            (
                graph.call_function(
                    aten.set_.source_Tensor, (graph.call_function(aten.empty.memory_format, ([4],)), x)
                ),
                1,
            ),
        ),
    ],
    ids=["no schema, no result", "batch norm", "dropout of nothing", "unsafe split", "set_"],
)
def test_calls_that_do_not_say_what_they_write(silent: Any) -> None:
    graph, (x,) = _graph("x")
    made = graph.call_function(aten.relu.default, (x,))
    last = silent(graph, made)
    last.meta["val"] = None if last.target is operator.setitem else torch.ones(4)
    work = build_work(_program(graph, graph.call_function(aten.neg.default, (made,))))
    assert set(work["neg_default"].reads) & set(work[last.name].writes)


def test_a_constant_that_is_fetched_twice_is_one() -> None:
    graph, (x,) = _graph("x")
    one, two = graph.get_attr("constant"), graph.get_attr("constant")
    over = graph.call_function(aten.add_.Tensor, (one, x))
    work = build_work(_program(graph, graph.call_function(aten.neg.default, (two,))))
    assert set(work["neg_default"].reads) & set(work[over.name].writes)


def test_calls_that_are_no_operators_are_refused() -> None:
    graph, (x,) = _graph("x")
    read = graph.call_function(aten.neg.default, (graph.call_method("relu_", (x,)),))
    with pytest.raises(ProgramError, match=r"relu_ is a call_method, whose memory accesses are unknown"):
        build_work(_program(graph, read))


def test_what_is_empty_at_first_has_memory_once_it_is_written() -> None:
    graph, (x,) = _graph("x")
    empty = graph.call_function(aten.empty.memory_format, ([0],))
    empty.meta["val"] = torch.empty(0)
    graph.call_function(aten.add.out, (x, x), {"out": empty})
    work = build_work(_program(graph, graph.call_function(aten.neg.default, (empty,))))
    assert work.storage_by_name[empty.name].nbytes is None, "its memory may be given back, and must not be too early"


def test_random_numbers_come_in_order() -> None:
    graph, (x,) = _graph("x")
    drawn = [graph.call_function(aten.rand_like.default, (x,)) for _ in range(2)]
    plain = graph.call_function(aten.scaled_dot_product_attention.default, (x, x, x))
    drops = graph.call_function(aten.scaled_dot_product_attention.default, (x, x, x, None, 0.5))
    work = build_work(_program(graph, *drawn, plain, drops))
    draws = [task.name for task in work.tasks if "default generator" in task.writes]
    assert draws == [drawn[0].name, drawn[1].name, drops.name]


def test_collectives_are_fixed() -> None:
    group = torch.ops._c10d_functional
    graph, (x,) = _graph("x")
    summed = graph.call_function(group.all_reduce.default, (x, "sum", "0"))
    waited = graph.call_function(group.wait_tensor.default, (summed,))
    read = graph.call_function(aten.neg.default, (summed,))
    work = build_work(_program(graph, read))
    assert [task.is_fixed for task in work.tasks] == [True, True, False]
    assert work[waited.name].writes == (summed.name,), "what is read before the wait is not what was summed"


def test_nested_graphs() -> None:
    """Nothing is known of what a branch does to what it is given: it is in order with all that touches that."""
    work = build_work(capture(branch()))
    assert check_schedule(work, serial_schedule(work)).ok
    (cond,) = [task for task in work.tasks if task.name.startswith("cond")]
    together = {value for name in cond.writes for value in work.storage_by_name[name].values}
    assert together >= {"x", "p_weight", cond.name}


def test_nested_graphs_draw_and_talk_to_others() -> None:
    """What a branch does counts as if the call did it."""
    graph, (x, which) = _graph("x", "which")
    talks, draws = _graph("y")[0], _graph("y")[0]
    for inner, target, more in (
        (talks, torch.ops._c10d_functional.all_reduce.default, ("sum", "0")),
        (draws, aten.rand_like.default, ()),
    ):
        inner.output((inner.call_function(target, (next(iter(inner.nodes)), *more)),))
    attach_subgraphs(graph, {name: fx.GraphModule({}, each) for name, each in (("talks", talks), ("draws", draws))})
    first = graph.call_function(aten.rand_like.default, (x,))
    branches = graph.get_attr("talks"), graph.get_attr("draws")
    cond = graph.call_function(torch.ops.higher_order.cond, (which, *branches, [first]))
    work = build_work(_program(graph, graph.call_function(operator.getitem, (cond, 0))))
    assert work[cond.name].is_fixed
    assert "default generator" in work[cond.name].writes


def test_in_place_programs_give_the_same_in_any_order_of_their_lanes() -> None:
    """Real tensors: what the room reads out of a graph is enough to keep every bit."""
    spread = 0
    for seed in range(200):
        rng = random.Random(seed)
        program, _ = random_program(rng, 20)
        names = [task.name for task in build_work(program).tasks]
        work = build_work(program, {name: rng.uniform(1e-5, 1e-3) for name in names})
        made = plan_schedule(work, lanes=3, event_seconds=0.0)
        spread += len(made.lanes) > 1
        outcomes = []
        for order in (names, any_order(rng, made)):
            given = {name: torch.full((SIZE, SIZE), 1.0 + place) for place, name in enumerate(INPUTS)}
            outcomes.append([*run_calls(program, given, calls_of(work, order)), *given.values()])
        assert all(torch.equal(*each) for each in zip(*outcomes, strict=True))
    assert spread > 100


def test_times_are_measured() -> None:
    program = program_of(lambda x, y: (x @ y, x.topk(2)[0]), [torch.ones(8, 8), torch.ones(8, 8)])
    given = {"values_0": torch.ones(8, 8), "values_1": torch.ones(8, 8)}
    times = measure_calls(program, given)
    work = build_work(program, times)
    assert set(times) == {task.name for task in work.tasks}
    assert min(times.values()) > 0
    with pytest.raises(UsageError, match="values_1 is missing"):
        measure_calls(program, {"values_0": torch.ones(8, 8)})
    with pytest.raises(UsageError, match="The duration of topk was not measured"):
        build_work(program, {name: time for name, time in times.items() if name != "topk"})
    assert 0 < measure_event(50) < 1
