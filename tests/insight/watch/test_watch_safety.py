"""What a watch must not do: change what is compiled, hide errors, wait for a lock that nobody holds, trust files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import (
    MULTIPLE,
    CallFunction,
    KeywordArg,
    PatternMatcherPass,
    fwd_only,
    register_graph_pattern,
    register_replacement,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from inlay import watch_startup
from inlay.cli.watch import print_passes
from inlay.errors import UsageError
from inlay.insight.findings import Finding
from inlay.insight.watch import bisection, folder, misses, observer, watch_patterns
from inlay.insight.watch.records import PassRecord
from inlay.rewrite.matcher import is_same_constant
from inlay.rewrite.reasons import Reason
from inlay.transforms.lock import LockDifference, read_lock
from inlay.watch_startup import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import fx

pytestmark = pytest.mark.fast
aten = torch.ops.aten


def _graph(function: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.GraphModule:
    with FakeTensorMode():
        return fwd_only(function, [torch.empty(shape) for shape in shapes])


def _sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.sin() + y, y + x.sin().exp(), x.view(-1)


def _double_pass(check: Callable[[Any], Any] = lambda match: True) -> PatternMatcherPass:
    """Two patterns of one name; the handlers leave what they match."""
    made = PatternMatcherPass(pass_name="doubled")
    for target in (aten.sin.default, aten.exp.default):

        def handler(match: Any, x: Any) -> None:
            pass

        register_graph_pattern(CallFunction(target, KeywordArg("x")), extra_check=check, pass_dict=made)(handler)
    return made


def test_counts_of_patterns_of_one_name_are_summed() -> None:
    with watch_patterns() as records:
        _double_pass().apply(_graph(_sums, (4,), (4,)))
    (record,) = records
    assert record.matches == sum(record.patterns.values()) == 3
    assert len(record.patterns) == 1


def test_what_a_handler_leaves_is_no_near_miss() -> None:
    with watch_patterns() as records:
        _double_pass().apply(_graph(_sums, (4,), (4,)))
    assert not records[0].findings


def test_an_error_of_torch_is_not_hidden() -> None:
    """A check without a result is an error of torch, also while it is watched."""
    forgotten = _double_pass(lambda match: None)
    with pytest.raises(AssertionError) as plain:
        forgotten.apply(_graph(_sums, (4,), (4,)))
    with watch_patterns(), pytest.raises(AssertionError) as watched:
        forgotten.apply(_graph(_sums, (4,), (4,)))
    assert str(watched.value) == str(plain.value)


def test_a_method_that_was_bound_before_the_watch() -> None:
    bound = _double_pass().apply
    module = _graph(_sums, (4,), (4,))
    with watch_patterns() as records:
        GraphTransformObserver(module, "custom").apply_graph_pass(bound)
        GraphTransformObserver(module, "custom").apply_graph_pass(pass_fn=bound)
    assert [(each.name, each.matches) for each in records] == [("doubled", 3), ("doubled", 3)]


def test_a_method_of_a_base_class() -> None:
    """It is called as it is, not looked up again in the class that calls it."""

    class Base(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            graph.create_node("call_function", aten.sin.default, (next(iter(graph.nodes)),))

        def uuid(self) -> None:
            return None

    class Timed(Base):
        def __call__(self, graph: fx.Graph) -> None:
            GraphTransformObserver(cast("fx.GraphModule", graph.owning_module), "timed").apply_graph_pass(
                super().__call__
            )

    module = _graph(_sums, (4,), (4,))
    with watch_patterns() as records:
        Timed()(module.graph)
    assert [each.name for each in records] == ["Timed"]
    assert records[0].changes == {"added aten.sin.default": 1}


def test_arguments_by_name() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1).graph
    pattern = torch.fx.symbolic_trace(lambda x: torch.relu(x)).graph
    with watch_patterns() as records:
        assert len(SubgraphMatcher(pattern).match(graph=graph)) == 1
    assert records[0].matches == 1


def test_a_matched_node_that_another_reader_keeps() -> None:
    """It can be part of a near miss; what only the match reads cannot."""

    def shared(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        negative = x.neg()
        return negative.exp() + 2, negative.exp() + 3

    made = PatternMatcherPass(pass_name="shared")
    inner = CallFunction(aten.exp.default, CallFunction(aten.neg.default, KeywordArg("x"), _users=MULTIPLE))

    @register_graph_pattern(CallFunction(aten.add.Tensor, inner, 2), pass_dict=made)
    def _(match: Any, x: Any) -> None:
        node = match.output_node()
        with match.graph.inserting_before(node):
            node.replace_all_uses_with(match.graph.call_function(aten.cos.default, (x,)))
        match.erase_nodes()

    with watch_patterns() as records:
        made.apply(_graph(shared, (4,)))
    (found,) = records[0].findings
    assert "other of add_1 is 3; expected 2" in found.text


def _single_pass(pattern: Any) -> PatternMatcherPass:
    made = PatternMatcherPass(pass_name="single")
    register_graph_pattern(pattern, pass_dict=made)(lambda match, **_: None)
    return made


def test_a_pattern_that_ends_in_a_write() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(aten.copy_.default, (y, graph.call_function(aten.exp.default, (x,)))),))
    made = _single_pass(
        CallFunction(aten.copy_.default, KeywordArg("y"), CallFunction(aten.exp.default, KeywordArg("x")))
    )
    with watch_patterns() as records:
        assert made.apply(torch.fx.GraphModule(torch.nn.Module(), graph)) == 0
    (found,) = records[0].findings
    assert "copy__default (aten.copy_.default) writes in place, and the pattern begins before it" in found.reason


def _slices(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x[..., :4]) * torch.sigmoid(x[..., 4:8]) + torch.tanh(x[..., 8:])


def _split(x: torch.Tensor) -> torch.Tensor:
    one, two, three = x.split(4, -1)
    return torch.relu(one) * torch.sigmoid(two) + torch.tanh(three)


def _changed_attention(x: torch.Tensor, change: Callable[[Any], Any]) -> torch.Tensor:
    q, k, v = (change(part.view(2, 16, 4, 4).transpose(1, 2)) for part in x.split(16, -1))
    scores = torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1)
    return (scores @ v).transpose(1, 2).reshape(2, 16, 16)


def _attention(x: torch.Tensor) -> torch.Tensor:
    return _changed_attention(x, lambda part: part)


@pytest.mark.parametrize(
    ("pattern", "model", "shape", "said"),
    [
        (_split, _slices, (2, 12), "aten.split.Tensor expected, slice_1 (aten.slice.Tensor) found"),
        (_attention, lambda x: _changed_attention(x, lambda part: part.contiguous()), (2, 16, 48), "clone"),
    ],
)
def test_one_change_in_several_places(pattern: Any, model: Any, shape: tuple[int, ...], said: str) -> None:
    """It is a near miss if the pattern is large, and the parts of one result are one change."""
    made = PatternMatcherPass(pass_name="changed")
    with FakeTensorMode():
        register_replacement(pattern, lambda x: x * 1, [torch.empty(shape)], fwd_only, [made])
    with watch_patterns() as records:
        assert made.apply(_graph(model, shape)) == 0
    assert said in records[0].near_misses[0].text


def test_another_operator_everywhere_is_no_near_miss() -> None:
    made = PatternMatcherPass(pass_name="other")
    with FakeTensorMode():
        register_replacement(_attention, lambda x: x * 1, [torch.empty(2, 16, 48)], fwd_only, [made])
    with watch_patterns() as records:
        made.apply(_graph(lambda x: (x.split(16, -1)[0].cos() * x.split(16, -1)[1].tan()).sum(-1), (2, 16, 48)))
    assert not records[0].near_misses


def test_a_graph_that_a_pass_left_unsorted() -> None:
    """Inductor sorts it later."""
    module = _graph(lambda x: (x.exp().sin(), x.exp().neg().sin()), (4,))
    exp = module.graph.find_nodes(op="call_function", target=aten.exp.default)[-1]
    exp.append(sin := module.graph.find_nodes(op="call_function", target=aten.sin.default)[-1])
    sin.prepend(exp)
    exp.next.append(exp)
    made = _single_pass(CallFunction(aten.sin.default, CallFunction(aten.exp.default, KeywordArg("x"))))
    with watch_patterns() as records:
        made.apply(module)
    assert not records[0].error
    assert "neg (aten.neg.default) stands in between" in records[0].findings[0].text


def test_a_graph_with_a_cycle() -> None:
    """The search ends with an error in the record."""
    module = _graph(lambda x: x.sin().exp(), (4,))
    sin, exp = (
        module.graph.find_nodes(op="call_function", target=each)[0] for each in (aten.sin.default, aten.exp.default)
    )
    sin.args = (exp,)
    with pytest.raises(ValueError, match="has a cycle"):
        misses._sorted_copy(module.graph)


def test_a_pass_that_is_named_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_passes([PassRecord("mine", "", 1, 0)])
    assert capsys.readouterr().out == "1 passes without a match, near miss or change.\n"
    print_passes([PassRecord("mine", "", 1, 0)], is_named=True)
    assert "Nothing in the graphs resembles the patterns of mine." in capsys.readouterr().out


def test_a_pattern_across_streams() -> None:
    module = _graph(lambda x: x.exp().sin(), (4,))
    for node in module.graph.find_nodes(op="call_function", target=aten.exp.default):
        node.meta["custom"] = {"stream": 1}
    made = _single_pass(CallFunction(aten.sin.default, CallFunction(aten.exp.default, KeywordArg("x"))))
    with watch_patterns() as records:
        assert made.apply(module) == 0
    assert "the nodes are on different streams: 0, 1" in records[0].findings[0].text


def test_a_pass_of_another_thread_at_the_start(tmp_path: Path) -> None:
    """It waits until the first one has imported what is needed."""
    program = """
import threading, torch
from torch._inductor.pattern_matcher import *
from torch._subclasses.fake_tensor import FakeTensorMode
passes = []
handler = lambda match, x: None
for name in ("first", "second"):
    made = PatternMatcherPass(pass_name=name)
    register_graph_pattern(CallFunction(torch.ops.aten.sin.default, KeywordArg("x")), pass_dict=made)(handler)
    with FakeTensorMode():
        passes.append((made, fwd_only(lambda x: x.sin(), [torch.empty(4)])))
begin = threading.Barrier(2)
def run(made, module):
    begin.wait()
    made.apply(module)
threads = [threading.Thread(target=run, args=each) for each in passes]
[each.start() for each in threads]
[each.join() for each in threads]
"""
    hook = "from inlay.watch_startup import install; install()\n"
    env = {**os.environ, "INLAY_WATCH": str(tmp_path / "watched")}
    subprocess.run([sys.executable, "-c", hook + program], env=env, check=True)
    assert sorted(folder.read_passes(tmp_path / "watched")) == ["first", "second"]


def test_a_function_that_fails_inside_of_another() -> None:
    """What the inner pass changed is not told again as a change of the outer function."""
    module = _graph(_sums, (4,), (4,))
    inner = PatternMatcherPass(pass_name="inner")

    @register_graph_pattern(CallFunction(aten.exp.default, KeywordArg("x")), pass_dict=inner)
    def _(match: Any, x: Any) -> None:
        match.output_node().target = aten.cos.default

    def fails(graph: fx.Graph) -> None:
        raise ValueError

    def outer(graph: fx.Graph) -> None:
        inner.apply(graph)
        with pytest.raises(ValueError):  # noqa: PT011
            GraphTransformObserver(module, "custom").apply_graph_pass(fails)

    with watch_patterns() as records:
        GraphTransformObserver(module, "custom").apply_graph_pass(outer)
    assert [each.name for each in records] == ["inner"]


def test_an_error_of_a_listener_does_not_reach_the_compilation(capsys: pytest.CaptureFixture[str]) -> None:
    def listener(record: PassRecord) -> None:
        raise RuntimeError("full")

    observer.add_listener(listener)
    try:
        assert _double_pass().apply(_graph(_sums, (4,), (4,))) == 3
    finally:
        observer.remove_listener(listener)
    assert "the record of doubled is lost: full" in capsys.readouterr().err


def test_a_limit_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INLAY_WATCH_LIMIT", "x")
    with watch_patterns() as records:
        assert _double_pass().apply(_graph(_sums, (4,), (4,))) == 3
    assert "invalid literal" in records[0].error


def test_a_patch_with_the_original_that_ends_during_the_watch() -> None:
    """It puts the original back; the next watch observes again."""
    original = PatternMatcherPass.apply
    patch = mock.patch.object(PatternMatcherPass, "apply", original)
    patch.start()
    with watch_patterns():
        patch.stop()
    assert PatternMatcherPass.apply is original
    with watch_patterns() as records:
        _double_pass().apply(_graph(_sums, (4,), (4,)))
    assert records


@pytest.mark.parametrize("lock", [observer._lock, folder._lock, bisection._lock, watch_startup._lock])
def test_a_fork_while_another_thread_holds_a_lock(lock: Any) -> None:
    is_held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with lock:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    end.set()
    thread.join()
    assert status == 0


def test_symbolic_sizes_are_compared_without_a_guard() -> None:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)  # type: ignore[var-annotated]
    mode = FakeTensorMode(shape_env=environment)
    one, two = cast("list[Any]", mode.from_tensor(torch.empty(7, 11), symbolic_context=context).shape)
    assert isinstance(one, torch.SymInt)
    before = len(environment.guards)
    assert is_same_constant(one, one)
    assert not is_same_constant(one, two)
    assert is_same_constant([one, 2], [one, 2])
    assert not is_same_constant([one, two], [two, one])
    assert len(environment.guards) == before


def _lines(path: Path) -> Path:
    record = PassRecord("norms", "0/0", 1, 2, {"search": 2}, left={"aten.sin.default": ("sin = …",)})
    (path / f"1{SUFFIX}").write_text(json.dumps(record.to_json()) + "\n")
    return path / f"1{SUFFIX}"


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    _lines(tmp_path)
    record = folder.read_passes(tmp_path)["norms"]
    assert (record.matches, record.patterns, record.left) == (2, {"search": 2}, {"aten.sin.default": ("sin = …",)})


@pytest.mark.parametrize(
    ("key", "value"),
    [("left", []), ("findings", [3]), ("findings", 3), ("places", 3), ("findings", [{"kind": []}])],
)
def test_a_file_that_is_not_a_record(tmp_path: Path, key: str, value: Any) -> None:
    file = _lines(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UsageError, match="is not a record"):
        folder.read_passes(tmp_path)


_FIELDS = [
    *PassRecord("", "", 0, 0).to_json(),
    "transform",
    "kind",
    "roots",
    "layers",
    "matched",
    "of",
    "sites",
    "reason",
]


@pytest.mark.parametrize("field", _FIELDS)
def test_values_of_other_types(tmp_path: Path, field: str) -> None:
    """Nothing but the declared type is a record, so that no command meets it."""
    kind = Finding("search", Reason.CONSTANT, "r", "add", ("add",), (0,), "a:1", 6, 6, 0, "s")
    record = PassRecord("norms", "0/0", 1, 2, {"search": 2}, findings=(kind,), num_left={"aten.sin.default": 1})
    data: Any = json.loads(json.dumps(record.to_json()))
    (tmp_path / f"1{SUFFIX}").write_text(json.dumps(data) + "\n")
    assert folder.read_records(tmp_path) == [record]
    values: list[Any] = [None, 3, "x", [1], {"a": []}, [["a"]], 1e400, True]
    for value in values:
        if field in data:
            changed = data | {field: value}
        else:
            changed = data | {"findings": [data["findings"][0] | {field: value}]}
        (tmp_path / f"1{SUFFIX}").write_text(json.dumps(changed) + "\n")
        with suppress(UsageError):
            passes = folder.read_passes(tmp_path)
            list(folder.compare_passes(folder.lock_passes("watched", passes), passes))


def test_a_process_that_was_killed_leaves_half_a_line(tmp_path: Path) -> None:
    file = _lines(tmp_path)
    file.write_text(file.read_text() + file.read_text()[:40])
    assert folder.read_passes(tmp_path)["norms"].matches == 2


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    _lines(tmp_path)
    (tmp_path / f"2{SUFFIX}").mkdir()
    (tmp_path / f"3{SUFFIX}").symlink_to("nowhere")
    os.mkfifo(tmp_path / f"4{SUFFIX}")
    assert folder.read_passes(tmp_path)["norms"].matches == 2


def test_incomplete_records_do_not_match_a_lock(tmp_path: Path) -> None:
    passes = folder.read_passes(_lines(tmp_path).parent)
    entry = folder.lock_passes("watched", passes)
    lost = {"norms": replace(passes["norms"], dropped=7, error="full"), "late": PassRecord("late", "", 0, 0, dropped=3)}
    assert "late" not in folder.lock_passes("watched", lost).transforms
    dropped, incomplete = folder.compare_passes(entry, lost)
    assert dropped.fails
    assert dropped.message == "10 calls of passes were not recorded: the counts are incomplete."
    assert not incomplete.fails
    assert incomplete.message == "The near misses of norms are incomplete: full."


def test_a_pass_with_a_colon_in_its_name() -> None:
    finding = Finding("search", Reason.CONSTANT, "r", "add", ("add",), (0,), "a:1", 6, 6, 0, "s")
    passes = {"my: pass": PassRecord("my: pass", "", 1, 0, findings=(finding,))}
    for key in ("my: pass", "my: pass: search"):
        assert folder.explain_miss(passes, key) == finding.text


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 100_000, b'{"name": 1}', b"3"])
def test_bytes_that_are_not_a_record(tmp_path: Path, text: bytes) -> None:
    _lines(tmp_path).write_bytes(text)
    with pytest.raises(UsageError, match="is not a record"):
        folder.read_passes(tmp_path)


def test_records_of_another_torch_are_a_difference(tmp_path: Path) -> None:
    passes = folder.read_passes(_lines(tmp_path).parent)
    entry = folder.lock_passes("watched", passes)
    assert not list(folder.compare_passes(entry, passes))
    file = _lines(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch": "2.0.1"}))
    (found,) = folder.compare_passes(entry, folder.read_passes(tmp_path))
    assert found.fails
    assert found.message.startswith("The records are of torch 2.0.1, and ")


def test_more_matches_have_no_reason(tmp_path: Path) -> None:
    passes = folder.read_passes(_lines(tmp_path).parent)
    entry = folder.lock_passes("watched", passes)
    entry.transforms["norms"].sites = 1
    (found,) = folder.compare_passes(entry, passes)
    assert found.message == "norms matched 2 sites, the lock has 1."


def test_an_annotation_is_one_command(tmp_path: Path) -> None:
    """The lock of a pull request may have any name in it."""
    made = LockDifference("x\n::stop-commands::t,file=y", "one\r\ntwo 5%").annotation(tmp_path / "a.lock")
    assert "\n" not in made
    assert "\r" not in made
    assert made.count("::") == 2
    assert made.endswith("::one%0D%0Atwo 5%25")


@pytest.mark.parametrize("text", ["format: " + "9" * 5000, "models: " + "[" * 5000, "a: 2024-13-45"])
def test_a_file_that_is_not_a_lock(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.lock").write_text(text)
    with pytest.raises(UsageError, match="is not a lock"):
        read_lock(tmp_path / "a.lock")
