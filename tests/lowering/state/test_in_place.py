"""What cannot be in place and why; aliases that users declare; state owned by the module or by the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inlay.analysis.state_updates import find_state_updates
from inlay.errors import UsageError
from inlay.frontend import Example, capture
from inlay.lowering.compiled_program import compile_program
from inlay.lowering.state.buffers import inline_lifted_buffers, lift_mutated_buffers
from inlay.lowering.state.declared_aliases import declare_aliases
from inlay.lowering.state.in_place_writes import copy_remarks, write_in_place
from inlay.lowering.state.index_put import canonicalize_updates
from inlay.lowering.state.state_copies import find_compiled_copies
from inlay.program.remarks import RemarkKind
from inlay.program.text.parser import parse
from inlay.program.text.printer import dump
from inlay.testing import program_of
from tests.lowering.state.update_forms import moved_within, old_value_read, shifted

pytestmark = pytest.mark.fast
CACHE, ROWS, AT = torch.zeros(1, 3, 16, 4), torch.randn(1, 3, 2, 4), torch.tensor([4, 5])


def returns_old(cache: Any, rows: Any, at: Any) -> Any:
    old = cache + 0
    cache.index_copy_(2, at, rows)
    return old


def returns_view_of_old(cache: Any, rows: Any, at: Any) -> Any:
    new = cache.index_copy(2, at, rows)
    before = cache[:, :, :2] * 1
    cache.copy_(new)
    return before


def swapped(one: Any, two: Any, at: Any) -> Any:
    keep = one.clone()
    one.copy_(two)
    two.copy_(keep)
    return at + 1


@pytest.mark.parametrize("function", [old_value_read, shifted, moved_within, returns_old, returns_view_of_old])
def test_right_whether_in_place_or_not(function: Any) -> None:
    program = program_of(function, [CACHE, ROWS, AT])
    for backend in ("eager",):
        compiled = compile_program(program, backend)
        one = torch.randn(CACHE.shape)
        two = one.clone()
        expected, actual = function(one, ROWS, AT), compiled(two, ROWS, AT)
        assert torch.equal(one, two)
        if expected is not None:
            assert torch.equal(expected, actual)


def test_two_states_that_change_places() -> None:
    program = program_of(swapped, [torch.ones(3), torch.zeros(3), torch.tensor(1)])
    one, two = torch.randn(3), torch.randn(3)
    first, second = one.clone(), two.clone()
    compile_program(program, "eager")(one, two, torch.tensor(1))
    assert torch.equal(one, second)
    assert torch.equal(two, first)


def test_a_reader_of_the_old_value_is_a_reason() -> None:
    """Built by hand: in what torch.export gives, a reader of the old value stands before the write."""
    program = program_of(lambda cache, rows, at: (cache.index_copy_(2, at, rows), None)[1], [CACHE, ROWS, AT])
    graph = program.graph
    base = next(node for node in graph.nodes if node.op == "placeholder")
    write = next(node for node in graph.nodes if node.target is torch.ops.aten.index_copy.default)
    with graph.inserting_after(write):
        late = graph.call_function(torch.ops.aten.neg.default, (base,))
        late.meta["val"] = base.meta["val"]
    output = graph.output_node()
    values: Any = output.args[0]
    output.args = ((values[0], late),)
    (state,) = find_state_updates(program)
    assert state.reason == "read after the write: neg_default reads the old value of values_0"
    (remark,) = write_in_place(program).remarks
    assert remark.reason.endswith("; f32[1, 3, 16, 4], 768 bytes, is copied at every call")


def test_a_plain_copy_is_one_write() -> None:
    program = program_of(lambda state, x: state.copy_(x), [torch.zeros(4), torch.ones(4)])
    (state,) = find_state_updates(program)
    assert (state.form, [write.size for write in state.writes]) == ("copy_", [4])


def test_several_writes_in_order() -> None:
    def model(cache: Any, rows: Any, at: Any) -> Any:
        cache.index_copy_(2, at, rows)
        first = cache.sum()
        cache[:, :, 4:6] += 1
        return first, cache.sum()

    program = program_of(model, [CACHE, ROWS, AT])
    (state,) = find_state_updates(program)
    assert state.is_eligible, state.reason
    assert len(state.writes) == 2
    one, two = torch.randn(CACHE.shape), torch.zeros(CACHE.shape)
    two.copy_(one)
    for left, right in zip(model(one, ROWS, AT), compile_program(program, "eager")(two, ROWS, AT), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(one, two)


# ---- functional updates that are refused or put at the end


@torch.library.custom_op("inlay_test::double", mutates_args={"x"})
def _double(x: torch.Tensor) -> None:
    x.mul_(2)


def _overlapping(state: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.select_scatter(state, torch.ops.aten.copy(state[0], state[1]), 0, 0)


def _of_another_dtype(state: torch.Tensor, x: torch.Tensor) -> Any:
    part = state[0] + x.double()
    return torch.select_scatter(state, part, 0, 0), part * 2


def _returned(state: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.select_scatter(state, x, 0, 0), state


def _doubled_part(state: torch.Tensor, x: torch.Tensor) -> Any:
    part = state[0] * x
    _double(part)
    return torch.select_scatter(state, part, 0, 0)


def _doubled_elsewhere(state: torch.Tensor, x: torch.Tensor) -> Any:
    other = x + torch.zeros(2, 3)
    _double(other)
    return other


def _of_another_shape(state: torch.Tensor, x: torch.Tensor) -> Any:
    """Between the views there and back the values are in another shape than the state is seen in."""
    return state.view(3, 2).sum(1).repeat(2).view(2, 3)


@torch.library.custom_op("inlay_test::double_both", mutates_args={"x", "y"})
def _double_both(x: torch.Tensor, y: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    x.mul_(by)
    y.mul_(by)
    return by + 1


@_double_both.register_fake
def _(x: torch.Tensor, y: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(by)


@pytest.mark.parametrize("is_state", [True, False], ids=["two states", "a state and another"])
def test_an_operator_that_writes_to_two_tensors(is_state: bool) -> None:
    def function(one: torch.Tensor, two: torch.Tensor, by: torch.Tensor) -> Any:
        other = two if is_state else two + 1
        given = _double_both(one, other, by)
        return given * 2, one.sum(), other.sum()

    tensors = [torch.randn(4), torch.randn(4), torch.randn(1)]
    program = program_of(function, tensors)
    together = "partial call: inlay_test.double_both.default also writes to a tensor that is not in place"
    assert [state.reason for state in find_state_updates(program)] == (["", ""] if is_state else [together])
    one, two = ([each.clone() for each in tensors] for _ in range(2))
    torch.testing.assert_close(compile_program(program, "eager")(*one), function(*two))
    torch.testing.assert_close(one, two)


@torch.library.custom_op("inlay_test::flat", mutates_args=())
def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1) * 2


@_flat.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel())


def _read_by_an_operator(state: torch.Tensor, x: torch.Tensor) -> Any:
    """It takes its operand to be contiguous."""
    part = state[:, :2] + x[0]
    return torch.slice_scatter(state, part, 1, 0, 2), _flat(part)


def _read_by_place(state: torch.Tensor, x: torch.Tensor) -> Any:
    part = state[:, 0] + x[:2]
    return torch.select_scatter(state, part, 1, 0), torch.as_strided(part, [1], [1], 1) * 2


def _put_by_place(state: torch.Tensor, x: torch.Tensor) -> Any:
    new = (x[:2, None] * torch.ones(2, 3)).t().contiguous().t()
    return torch.as_strided_scatter(new, x, [3], [1])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_read_by_an_operator, ""),
        (_read_by_place, "layout: add is read with as_strided, and its layout differs from the state's"),
        (_put_by_place, ""),
        (_overlapping, "overlap: copy_ reads select_1, which shares the storage it writes to"),
        (_of_another_dtype, "dtype: add is torch.float64, the state is torch.float32"),
        (_returned, "returned: the value of values_0 before the write is returned"),
        (_doubled_part, "part: inlay_test.double.default receives only a part of the state"),
        (_doubled_elsewhere, ""),
        (_of_another_shape, ""),
    ],
)
def test_functional_updates(function: Any, reason: str) -> None:
    program = declare_aliases(program_of(function, [torch.ones(2, 3), torch.ones(3)]), {0: 0})
    (found,) = find_state_updates(program)
    assert found.reason == reason
    state, x = torch.randn(2, 3), torch.randn(3)
    expected = function(state.clone(), x)
    actual = compile_program(program, "eager")(state, x)
    for one, two in zip(*((each if isinstance(each, tuple) else (each,)) for each in (expected, actual)), strict=True):
        torch.testing.assert_close(two, one)
    torch.testing.assert_close(state, expected[0] if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize("is_turned", [False, True], ids=["row by row", "column by column"])
def test_views_of_a_value_that_lies_otherwise_than_the_state(is_turned: bool) -> None:
    def function(state: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        new = x * 2
        part = new[0:2].view(-1).index_copy(0, at, x[0, :1]).view(2, 3)
        return torch.slice_scatter(new, part, 0, 0, 2)

    state, x, at = torch.randn(3, 3), torch.randn(3, 3), torch.tensor([4])
    state = state.t() if is_turned else state
    program = declare_aliases(program_of(function, [state, x, at]), {0: 0})
    for each in (program, canonicalize_updates(program)[0]):
        compile_program(each, "eager")(state, x, at)
        assert torch.equal(state, function(state, x, at))


def _through_a_view(state: torch.Tensor, x: torch.Tensor) -> Any:
    state.view(-1).add_(1)
    return state


def _through_a_transposed_view(state: torch.Tensor, x: torch.Tensor) -> Any:
    state.transpose(0, 1).index_copy_(1, torch.arange(1, 2), x[:, None])
    return state


@pytest.mark.parametrize("function", [_through_a_view, _through_a_transposed_view])
def test_a_state_that_is_returned_is_no_copy(function: Any) -> None:
    program = program_of(function, [torch.ones(2, 3), torch.ones(3)])
    for each in (program, canonicalize_updates(program)[0]):
        made = write_in_place(each)
        assert all(state.is_eligible for state in made.states)
        assert made.program.op_counts()["aten.clone.default"] == 0
        state, x = torch.randn(2, 3), torch.randn(3)
        actual = compile_program(each, "eager")(state, x)
        assert actual.data_ptr() == state.data_ptr()


def test_a_part_that_is_declared_to_be_another_state() -> None:
    def function(one: torch.Tensor, two: torch.Tensor) -> Any:
        part = one[0] + 1
        return torch.select_scatter(one, part, 0, 0), part

    one, two = torch.randn(2, 3), torch.randn(3)
    expected = function(one, two)
    program = declare_aliases(program_of(function, [one, two]), {0: 0, 1: 1})
    actual = compile_program(program, "eager")(one, two)
    assert (actual[0] is one, actual[1] is two) == (True, True)
    torch.testing.assert_close([one, two], list(expected))


def test_how_much_a_custom_operator_writes_is_not_known() -> None:
    program = program_of(lambda state: (_double(state), state.sum())[1], [torch.ones(4)])
    (state,) = find_state_updates(program)
    assert (state.reason, [(write.form, write.size) for write in state.writes]) == ("", [("double", None)])


def test_what_writes_to_the_state_itself_is_a_reason() -> None:
    """Built by hand: a captured program has no such call."""
    program = program_of(lambda state, x: (state.add_(x), None)[1], [torch.ones(4), torch.ones(4)])
    graph = program.graph
    base, add = (next(node for node in graph.nodes if node.name == name) for name in ("values_0", "add"))
    with graph.inserting_before(add):
        call = graph.call_function(torch.ops.aten.neg_.default, (base,))
        call.meta["val"] = base.meta["val"]
    (state,) = find_state_updates(program)
    assert state.reason == "other write: neg__default also writes to values_0"


# ---- declared aliases


def step(state: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"new_state": state * 0.5 + x, "y": (state * x).sum()}


@pytest.mark.parametrize("alias", [{"new_state": "values_0"}, {0: 0}, {"0": "0"}])
def test_declared(alias: dict[Any, Any]) -> None:
    program = program_of(step, [torch.ones(4), torch.ones(4)])
    compiled = compile_program(program, "eager", alias=alias)
    state, x = torch.randn(4), torch.randn(4)
    expected = step(state.clone(), x)
    actual = compiled(state, x)
    assert actual["new_state"] is state
    assert torch.equal(state, expected["new_state"])
    assert torch.equal(actual["y"], expected["y"])
    assert compiled.bindings.outs[0].alias is not None
    assert compiled.bindings.outs[0].alias.kind == "declared"


@pytest.mark.parametrize(
    ("args", "alias", "sentence"),
    [
        ([torch.ones(4), torch.ones(4)], {"nw_state": 0}, "no output nw_state. Did you mean new_state?"),
        ([torch.ones(4), torch.ones(4)], {"new_state": 7}, "no input 7; the program has 2"),
        ([torch.ones(4), torch.ones(4)], {"y": 0}, "y (f32[]) cannot live in values_0 (f32[4]): the shapes differ"),
        (
            [torch.ones(4), torch.ones(4).double()],
            {"new_state": 0},
            "(f64[4]) cannot live in values_0 (f32[4]): the dtypes",
        ),
    ],
)
def test_declared_wrongly(args: list[Any], alias: dict[Any, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        declare_aliases(program_of(step, args), alias)
    assert sentence in str(error.value)


def test_two_outputs_in_one_input() -> None:
    program = program_of(lambda s, x: (s + x, s - x), [torch.ones(4), torch.ones(4)])
    with pytest.raises(UsageError, match="already lives there"):
        declare_aliases(program, {0: 0, 1: 0})


def test_declared_swap() -> None:
    """Each new value is the other's old one: neither can be written first."""
    program = program_of(lambda a, b: (b + 0, a + 0), [torch.ones(4), torch.ones(4)])
    compiled = compile_program(program, "eager", alias={0: 0, 1: 1})
    one, two = torch.randn(4), torch.randn(4)
    first, second = one.clone(), two.clone()
    compiled(one, two)
    assert torch.equal(one, second)
    assert torch.equal(two, first)


def test_an_input_replaces_a_state() -> None:
    """Nothing computes the new value, so there is no place for a write: the input comes before the state."""
    program = program_of(lambda x, state: (x,), [torch.ones(4), torch.ones(4)])
    compiled = compile_program(program, "eager", alias={0: 1})
    assert [state.reason for state in compiled.states] == ["replaced: the new value is not computed from the old one"]
    x, state = torch.randn(4), torch.randn(4)
    compiled(x, state)
    assert torch.equal(x, state)


# ---- buffers


class Counter(torch.nn.Module):
    rows: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.register_buffer("rows", torch.zeros(8, 4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.index_copy_(0, self.steps.view(1), x @ self.weight)
        self.steps.add_(1)
        return self.rows.sum(0)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.counter(x)
        return result


def test_introspect_construct_run() -> None:
    model = Net()
    program = capture(Example(model, (torch.ones(1, 4),)))
    compiled = compile_program(program, "eager", lift_mutable_buffers=True)
    state = {
        row.target.replace(".", "_"): torch.zeros([int(size) for size in row.shape], dtype=getattr(torch, row.dtype))
        for row in compiled.bindings.state
    }
    assert set(state) == {"counter_rows", "counter_steps"}
    for _ in range(3):
        x = torch.randn(1, 4)
        torch.testing.assert_close(compiled(x, **state), model(x))
    torch.testing.assert_close(state["counter_rows"], model.counter.rows)
    assert state["counter_steps"] == 3
    with pytest.raises(UsageError, match="lacks counter_rows"):
        compiled(x)


def test_there_and_back() -> None:
    program = capture(Example(Net(), (torch.ones(1, 4),)))
    lifted = lift_mutated_buffers(program)
    assert dump(parse(dump(lifted), lifted.tensors)) == dump(lifted)
    again = inline_lifted_buffers(lifted)
    assert {row.name: row.role for row in again.bindings} == {row.name: row.role for row in program.bindings}
    one, two = program.module(), again.module()
    assert dict(two.named_buffers()).keys() == dict(one.named_buffers()).keys()
    for _ in range(3):
        x = torch.randn(1, 4)
        assert torch.equal(one(x), two(x))


def test_state_is_the_programs_own() -> None:
    """Two compiled programs do not share what they own, and leave the captured module alone."""
    model = Net()
    program = capture(Example(model, (torch.ones(1, 4),)))
    one, two = compile_program(program, "eager"), compile_program(program, "eager")
    one(torch.ones(1, 4))
    assert torch.equal(two(torch.ones(1, 4)), Net.forward(model, torch.ones(1, 4)))


def test_a_small_state_has_a_remark_too() -> None:
    """A counter that is read after it was written counts as in place; that it may be copied is told."""

    def read_back(count: Any, x: Any) -> Any:
        count.add_(1)
        return x * count

    for function, said in ((read_back, 1), (lambda count, x: (x * count, count.add_(1))[0], 0)):
        program = program_of(function, [torch.zeros(2), torch.ones(2)])
        (state,) = found = find_compiled_copies(program)
        assert state.is_eligible
        remarks = copy_remarks(found)
        assert len(remarks) == said
        for remark in remarks:
            assert (remark.kind, remark.nodes) == (RemarkKind.ANALYSIS, ("values_0",))
            assert remark.reason.startswith("read after the write: ")
            assert remark.reason.endswith("; f32[2], 8 bytes, may be copied at every call")
        assert not compile_program(program, "eager").remarks
