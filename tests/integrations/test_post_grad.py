"""fix_functionalization in Inductor: numbers, state and generated code, with the pass and without.

The state is (32, 16) and nothing else is: a copy of it is an `empty_strided_cpu` of that size or of 512 numbers.
"""

from __future__ import annotations

import random
import re
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tools.fuzz_writes import operators  # noqa: F401 - registers torch.ops.inlay_fuzz
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.custom_graph_pass import get_custom_graph_passes
from torch._inductor.utils import run_and_get_code
from torch.utils._pytree import tree_leaves

from inlay.analysis.liveness import CopyReason
from inlay.integrations.post_grad import FixFunctionalization, in_place_writes
from tests.in_place_graphs import Build
from tests.in_place_graphs import keys_and_values as keys_and_values_graph

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inlay.lowering.state.defunctionalization import FixReport

fuzz = torch.ops.inlay_fuzz
_STATE = re.compile(r"empty_strided_cpu\(\((?:32, 16|16, 32|512, )\)")
_CALL = re.compile(r"torch\.ops\.inlay_fuzz\.\w+\.default\((.*)\)$", re.MULTILINE)


def _inputs() -> list[torch.Tensor]:
    return [torch.arange(512).reshape(32, 16) % 7, torch.arange(512).reshape(32, 16) % 5, torch.arange(4) + 1]


@dataclass(frozen=True)
class Case:
    """A function of two states and a small tensor."""

    run: Callable[..., Any]
    buffers: int
    """How many tensors of the size of the state the code with the pass makes."""
    in_place: int = 1
    stays: tuple[CopyReason, ...] = ()
    right_without: bool = True
    """Whether Inductor alone computes this as eager does."""


def whole(k: Any, v: Any, y: Any) -> Any:
    fuzz.put(k, y)


def returned(k: Any, v: Any, y: Any) -> Any:
    fuzz.put(k, y)
    return k


def rows(k: Any, v: Any, y: Any) -> Any:
    fuzz.put(k[2:6], y)


def one_row(k: Any, v: Any, y: Any) -> Any:
    fuzz.put(k[3], y)


def column(k: Any, v: Any, y: Any) -> Any:
    fuzz.put(k[:, 3], y)


def keys_and_values(k: Any, v: Any, y: Any) -> Any:
    return fuzz.two(k, y, v)


def twice(k: Any, v: Any, y: Any) -> Any:
    fuzz.put(k, y)
    fuzz.put(k, v[0])


def a_list(k: Any, v: Any, y: Any) -> Any:
    fuzz.many([k, v], y)


def a_list_of_rows(k: Any, v: Any, y: Any) -> Any:
    fuzz.many([k[0], k[2]], y)


def handed_on(k: Any, v: Any, y: Any) -> Any:
    return fuzz.bump_(k, y).sum()


def one_missing(k: Any, v: Any, y: Any) -> Any:
    return fuzz.both(k, None, y)


def by_name(k: Any, v: Any, y: Any) -> Any:
    fuzz.keyed(k, y=y, k=3)


def read_before(k: Any, v: Any, y: Any) -> Any:
    before = k.sum()
    fuzz.put(k, before)
    return before + k.sum()


def own(k: Any, v: Any, y: Any) -> Any:
    mine = k + v
    fuzz.put(mine, y)
    return mine


def with_index_put(k: Any, v: Any, y: Any) -> Any:
    k.index_put_((y,), v[0])
    fuzz.put(k, y)


def another_row(k: Any, v: Any, y: Any) -> Any:
    fuzz.put(k[0:2], k[4])


FIRES = [
    Case(whole, 0),
    Case(returned, 0),
    Case(rows, 0),
    Case(one_row, 0),
    Case(column, 0),
    Case(keys_and_values, 0, in_place=2),
    Case(twice, 0, in_place=2),
    Case(a_list, 0, in_place=2),
    Case(a_list_of_rows, 0),
    Case(handed_on, 0),
    Case(one_missing, 0),
    Case(by_name, 0),
    Case(read_before, 0),
    Case(own, 1),
    Case(with_index_put, 0),
    Case(another_row, 0),
]


def clone_and_origin(k: Any, v: Any, y: Any) -> Any:
    """pytorch#198031"""
    mine = k + v
    copy = mine.clone()
    fuzz.put(copy, mine)
    return copy


def clone_of_an_input(k: Any, v: Any, y: Any) -> Any:
    copy = k.clone()
    fuzz.put(copy, k)
    return copy


def overlapping(k: Any, v: Any, y: Any) -> Any:
    mine = k + v
    copy = mine.clone()
    fuzz.put(copy, mine[1:5])
    return copy


def read_after(k: Any, v: Any, y: Any) -> Any:
    old = k.clone()
    fuzz.put(k, y)
    return old


def view_read_after(k: Any, v: Any, y: Any) -> Any:
    mine = k + v
    copy = mine.clone()
    fuzz.put(copy, y)
    return copy, mine[3].sum()


def returned_too(k: Any, v: Any, y: Any) -> Any:
    fuzz.put(k, y)
    return k.clone()


def returned_twice(k: Any, v: Any, y: Any) -> Any:
    mine = k + v
    copy = mine.clone()
    fuzz.put(copy, y)
    return mine, copy


def not_changed(k: Any, v: Any, y: Any) -> Any:
    copy = k.clone()
    fuzz.put(copy, y)
    return copy.sum()


def row_of_what_is_not_changed(k: Any, v: Any, y: Any) -> Any:
    copy = k.clone()
    fuzz.put(copy[3], y)
    return copy.sum()


def both_of_one(k: Any, v: Any, y: Any) -> Any:
    mine = k + v
    copy = mine.clone()
    made = fuzz.two(mine, y, copy)
    return made, mine, copy


def list_of_clones(k: Any, v: Any, y: Any) -> Any:
    mine = k + v
    copy = mine.clone()
    fuzz.many([mine, copy], y)
    return mine, copy


def clone_of_rows(k: Any, v: Any, y: Any) -> Any:
    """The compiler takes the clone away and leaves a view told by an offset in what was cloned."""
    copy = k[2:].clone()
    fuzz.put(copy[0], y)
    return copy.sum()


def one_goes_one_stays(k: Any, v: Any, y: Any) -> Any:
    copy = v.clone()
    made = fuzz.two(k, y, copy)
    return made, copy.sum()


STAYS = [
    Case(clone_and_origin, 2, 0, (CopyReason.SHARED_STORAGE,), right_without=False),
    Case(clone_of_an_input, 1, 0, (CopyReason.SHARED_STORAGE,)),
    Case(overlapping, 1, 0, (CopyReason.SHARED_STORAGE,), right_without=False),
    Case(read_after, 1, 1),
    Case(view_read_after, 1, 0, (CopyReason.READ_AFTER_WRITE,)),
    Case(returned_too, 1, 0, (CopyReason.RETURNED,), right_without=False),
    Case(returned_twice, 2, 0, (CopyReason.READ_AFTER_WRITE,)),
    Case(not_changed, 1, 0, (CopyReason.NOT_COPIED_BACK,)),
    Case(row_of_what_is_not_changed, 1, 0, (CopyReason.NOT_COPIED_BACK,)),
    Case(both_of_one, 2, 0, (CopyReason.SHARED_STORAGE, CopyReason.SHARED_STORAGE)),
    Case(list_of_clones, 2, 0, (CopyReason.SHARED_STORAGE, CopyReason.SHARED_STORAGE)),
    Case(clone_of_rows, 0, 0, (CopyReason.OFFSET_MISMATCH,), right_without=False),
    Case(one_goes_one_stays, 1, 1, (CopyReason.NOT_COPIED_BACK,)),
]


def _name(case: Case) -> str:
    return case.run.__name__


def _compiled(run: Callable[..., Any], inputs: list[torch.Tensor], options: dict[str, Any]) -> tuple[Any, str]:
    torch._dynamo.reset()
    # Graphs are compiled again, so that the pass runs; C++ that was compiled before is not.
    with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        result, code = run_and_get_code(torch.compile(run, dynamic=False, options=options), *inputs)
    return result, "\n".join(code)


def _fixed(run: Callable[..., Any]) -> tuple[Any, list[torch.Tensor], str, FixReport]:
    added, inputs = FixFunctionalization(), _inputs()
    result, code = _compiled(run, inputs, {"post_grad_custom_post_pass": added})
    (fixed,) = added.reports
    return result, inputs, code, fixed


def _same(run: Callable[..., Any], result: Any, inputs: list[torch.Tensor]) -> bool:
    """Whether results, inputs afterwards and which of them share storage are as in eager mode."""
    again = _inputs()
    expected = [*tree_leaves(run(*again)), *again]
    actual = [*tree_leaves(result), *inputs]
    if not all(one is two is None or torch.equal(one, two) for one, two in zip(actual, expected, strict=True)):
        return False
    places = [
        [each.untyped_storage().data_ptr() for each in values if each is not None] for values in (actual, expected)
    ]
    shared = [[[one == two for one in each] for two in each] for each in places]
    return shared[0] == shared[1]


@pytest.mark.parametrize("case", [*FIRES, *STAYS], ids=_name)
def test_compiled(case: Case) -> None:
    result, inputs, code, fixed = _fixed(case.run)
    assert _same(case.run, result, inputs)
    assert len(fixed.in_place) == case.in_place
    assert tuple(each.copy_required.reason for each in fixed.copied if each.copy_required) == case.stays
    assert len(_STATE.findall(code)) == case.buffers, code
    calls = _CALL.findall(code)
    assert calls
    written_input = re.match(r"\[?(reinterpret_tensor\()?arg\d_1", calls[0])
    assert bool(written_input) == (case.in_place > 0 and case.run is not own)
    result, code = _compiled(case.run, inputs := _inputs(), {})
    if case.right_without:
        assert _same(case.run, result, inputs)
        assert len(_STATE.findall(code)) >= case.buffers, "the pass makes a copy that Inductor alone does not make"


@pytest.mark.parametrize(("run", "in_place"), [(whole, 1), (keys_and_values, 2), (a_list, 2), (one_row, 0), (own, 1)])
def test_the_first_form_of_wrapper(run: Callable[..., Any], in_place: int) -> None:
    """A row of an input is put back by select_scatter there, which reads the old value."""
    with config.patch(enable_auto_functionalized_v2=False):
        result, inputs, code, fixed = _fixed(run)
    assert _same(run, result, inputs)
    assert len(fixed.in_place) == in_place
    if run is not own and in_place:
        assert not _STATE.findall(code)


def test_the_context_and_another_pass() -> None:
    """Passes that are there already run as before."""
    seen: list[str] = []

    def another(graph: torch.fx.Graph) -> None:
        seen.extend(str(node.target) for node in graph.nodes if node.op == "call_function")

    with config.patch(post_grad_custom_post_pass=another), in_place_writes() as reports:
        _compiled(whole, _inputs(), {})
    assert "auto_functionalized_v2" in seen
    assert [len(each.in_place) for each in reports] == [1]
    assert config.post_grad_custom_post_pass is None


def test_the_cache_keeps_code_with_and_without_the_pass_apart() -> None:
    """A number in the function that no earlier run has put into the cache."""
    added, salt = FixFunctionalization(), random.SystemRandom().randrange(2**40)

    def run(k: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        fuzz.put(k, y + salt)
        return k.clone()

    passes: dict[str, Any] = {"post_grad_custom_post_pass": added}
    for options, reports, shared in (({}, 0, True), (passes, 1, False), (passes, 1, False), ({}, 1, True)):
        torch._dynamo.reset()
        k, _, y = _inputs()
        result = torch.compile(run, dynamic=False, options=options)(k, y)
        assert (result.data_ptr() == k.data_ptr()) is shared
        assert len(added.reports) == reports, "what comes from the cache is not compiled again"


def test_nothing_is_done_where_calls_are_moved_about() -> None:
    with config.patch({"aten_distributed_optimizations.enable_overlap_scheduling": True}), in_place_writes() as reports:
        graph = keys_and_values_graph(Build()).graph
        (added,) = get_custom_graph_passes(config.post_grad_custom_post_pass)
        before = str(graph)
        added(graph)
    assert str(graph) == before
    assert [each.copy_required for each in reports[0].copied] == [(CopyReason.REORDERED_CALLS, "")] * 2


class _Caches(torch.nn.Module):
    """A cache that the module holds and one that it is given."""

    held: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(32, 16, dtype=torch.int64))

    def forward(self, given: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        fuzz.put(self.held, y)
        fuzz.put(given[3], y)
        return self.held[0] + given[3]


def test_ahead_of_time(tmp_path: Path) -> None:
    """A package made outside Inlay: the caches are written where they are, call after call."""
    added, module = FixFunctionalization(), _Caches()
    given, _, y = _inputs()
    exported = torch.export.export(module, (given.clone(), y), strict=False)
    file = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(tmp_path / "caches.pt2"),
        inductor_configs={"post_grad_custom_post_pass": added, "force_disable_caches": True},
    )
    (fixed,) = added.reports
    assert (len(fixed.in_place), fixed.copies_removed, fixed.copied) == (2, 2, ())
    with zipfile.ZipFile(file) as package:
        code = "\n".join(package.read(name).decode() for name in package.namelist() if name.endswith(".wrapper.cpp"))
    assert code.count("aoti_torch_proxy_executor_call_function(") == 2
    assert not re.search(r"int_array_\d+\[\] = \{32L, 16L\};", code), "a tensor of the size of a cache is made"
    compiled, eager = torch._inductor.aoti_load_package(file), _Caches()
    mine, theirs = given.clone(), given.clone()
    for _ in range(2):
        assert torch.equal(compiled(mine, y), eager(theirs, y))
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("run", "in_place"), [(whole, 1), (column, 1), (clone_and_origin, 0), (returned_too, 0)])
def test_symbolic_sizes(run: Callable[..., Any], in_place: int) -> None:
    added, inputs = FixFunctionalization(), _inputs()
    torch._dynamo.reset()
    options: dict[str, Any] = {"post_grad_custom_post_pass": added, "fx_graph_cache": False}
    compiled = torch.compile(run, dynamic=True, options=options)
    assert _same(run, compiled(*inputs), inputs)
    (fixed,) = added.reports
    assert len(fixed.in_place) == in_place
    assert {each.nbytes for each in (*fixed.in_place, *fixed.copied)} == {None}
    smaller, again = ([each[:7].clone() for each in _inputs()[:2]] + _inputs()[2:] for _ in range(2))
    compiled(*smaller)
    run(*again)
    assert all(torch.equal(one, two) for one, two in zip(smaller, again, strict=True))
    assert len(added.reports) == 1, "another size is no reason to compile again"
