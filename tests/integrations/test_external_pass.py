"""External passes: every kind of callable, what they may return, what they must not change."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from inlay.cli.main import app
from inlay.errors import TransformError, UsageError
from inlay.integrations.external_pass import ExternalPass, load_external_pass
from inlay.program.text.printer import dump
from inlay.testing import program_of
from inlay.transforms import TransformRecord, run
from inlay.transforms.pass_manager import TransformStep
from tests import external_passes

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program import Program

pytestmark = pytest.mark.fast


class Net(torch.nn.Module):
    """A parameter, a buffer that is written, an input that is not read, two outputs, dynamic sizes."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, unread: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        hidden = torch.relu(torch.nn.functional.linear(x, self.weight))
        return hidden * 2, hidden.sum(-1)


ARGS = [torch.linspace(-2, 2, 20).reshape(5, 4), torch.ones(2)]


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(Net(), ARGS, axes={"x": {0: "rows"}})


def _run(program: Program, name: str) -> tuple[Program, TransformRecord]:
    text = f"external_passes:{name}"
    result, records = run(program, [TransformStep(text, load_external_pass(text))])
    return result, records[0]


def _expected(offset: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.nn.functional.gelu(ARGS[0] @ Net().weight.T) + offset
    return hidden * 2, hidden.sum(-1)


def _same(program: Program, expected: Any) -> None:
    with torch.no_grad():
        for got, want in zip(program.module()(*ARGS), expected, strict=True):
            torch.testing.assert_close(got, want)


KINDS = ["returns_module", "in_place", "over_graph", "Based", "based", "PostGrad", "Patterns"]


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_passes(program: Program, name: str) -> None:
    before = dump(program)
    result, record = _run(program, name)
    assert record.sites == 1
    assert record.has_site_count == (name == "Patterns")
    assert record.transform == f"external_passes:{name}"
    assert result.op_counts()["aten.gelu.default"] == 1
    assert "aten.relu.default" not in result.op_counts()
    made = next(node for node in result.graph.nodes if node.target is torch.ops.aten.gelu.default)
    assert result.types.text(made.meta["val"]) == "f32[rows, 3]", "the size is the symbol it was"
    assert result.bindings == program.bindings
    assert dump(program) == before, "the program that went in is untouched"
    _same(result, _expected())


def test_inductor_pass_object(program: Program) -> None:
    applied = ExternalPass(external_passes.inductor_pass()).apply(program.copy())
    assert applied.sites == 1
    _same(applied.program, _expected())


def _four(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.relu().tanh().relu() @ y.relu()).relu()


@pytest.fixture(scope="module")
def four() -> Program:
    return program_of(_four, [torch.ones(2, 3), torch.ones(3, 4)])


def _swapped(four: Program, function: Any, for_: str = "aten.gelu.default") -> TransformRecord:
    result, (record,) = run(four, [TransformStep("external", ExternalPass(function))])
    assert (result.op_counts()[for_], result.op_counts()["aten.relu.default"]) == (4, 0)
    return record


def test_a_count_that_a_pass_keeps(four: Program) -> None:
    """Whether it adds to it or sets it, and however often it ran before."""
    counted = external_passes.Counted()
    for _ in range(2):
        record = _swapped(four, counted)
        assert (record.sites, record.has_site_count) == (4, True)
        assert "matches=4 " in record.summary


def test_the_count_of_an_inductor_pass(four: Program) -> None:
    record = _swapped(four, external_passes.relu_patterns(), "aten.sigmoid.default")
    assert (record.sites, record.has_site_count, record.notes) == (4, True, ())


def test_what_is_not_counted_is_not_called_matches(four: Program) -> None:
    record = _swapped(four, external_passes.in_place)
    assert (record.sites, record.has_site_count) == (4, False)
    assert "changed_nodes=4 " in record.summary
    assert "matches=" not in record.summary
    assert (record.to_json()["matches"], record.to_json()["changed_nodes"]) == (None, 4)


def test_a_method_of_a_pass_is_not_a_reason(four: Program) -> None:
    class Unchanged:
        def skip_reason(self, graph: Any) -> str:
            return "for its own use"

        def __call__(self, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
            return gm

    _, (record,) = run(four, [TransformStep("external", ExternalPass(Unchanged()))])
    assert (record.sites, record.skip_reason) == (0, "")


@pytest.mark.parametrize("wrapped", [False, True], ids=["the collection", "a function that applies it"])
def test_patterns_for_another_level(four: Program, wrapped: bool) -> None:
    """A zero that could be nothing else says so, with the operators that are not there."""
    patterns = external_passes.post_grad_patterns()
    function = (lambda gm: patterns.apply(gm)) if wrapped else patterns
    result, (record,) = run(four, [TransformStep("external", ExternalPass(function))])
    assert (result, record.sites) == (four, 0)
    (note,) = record.notes
    assert note.reason.startswith("1 of its 1 patterns cannot match: the program does not call ")
    for name in ("aten.mm.default", "aten.exp.default", "aten.neg.default"):
        assert name in note.reason
    assert "aten.relu" not in note.reason
    assert "post-grad" in note.reason


def test_a_pass_of_the_form_of_another_level(four: Program) -> None:
    class Silent(external_passes.PostGrad):
        def __call__(self, graph: Any) -> None:
            pass

    _, (record,) = run(four, [TransformStep("external", ExternalPass(Silent()))])
    assert [note.reason.partition(".")[0] for note in record.notes] == [
        "It takes a graph, as Inductor's post-grad passes do"
    ]


def test_patterns_of_this_level_that_match_nothing() -> None:
    """Nothing is said of levels where every operator is there."""
    program = program_of(lambda x: x.tanh(), [torch.ones(2, 3)])
    _, (record,) = run(program, [TransformStep("external", ExternalPass(external_passes.Patterns()))])
    assert (record.sites, record.notes) == (0, ())


def test_a_pass_that_does_nothing_matched_nothing(program: Program) -> None:
    result, record = _run(program, "nothing")
    assert record.sites == 0
    assert result is program


def test_functions_and_methods_become_operators(program: Program) -> None:
    result, _ = _run(program, "with_functions")
    assert result.op_counts()["aten.gelu.default"] == 1
    assert result.op_counts()["aten.add.Tensor"] == program.op_counts()["aten.add.Tensor"] + 1
    _same(result, _expected(0.5))


def test_a_graph_that_was_made_anew(program: Program) -> None:
    result, record = _run(program, "retraced")
    assert record.sites == result.op_counts()["aten.neg.default"] == sum(program.op_counts().values())
    assert [row.name for row in result.bindings.ins] == [n.name for n in result.graph.nodes if n.op == "placeholder"]
    _same(result, program.module()(*ARGS))


def test_mutation_survives(program: Program) -> None:
    result, _ = _run(program, "retraced")
    module: Any = result.module()
    for calls in (1, 2):
        module(*ARGS)
        assert module.calls.item() == calls


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("drops_an_input", "The graph has 3 placeholders, expected 4: missing unread."),
        ("swaps_inputs", "Placeholder 0 is b_calls, expected p_weight: the order changed."),
        ("drops_an_output", "The graph has 2 outputs, expected 3."),
        ("widens_an_output", "is f64[rows], expected f32[rows]."),
        ("keeps_a_stale_type", "is f64[rows, 3], expected f32[rows, 3]."),
        ("writes_to_an_input", "(aten.add_.Tensor) writes to x, which the program only reads."),
        ("brings_a_tensor", "mine is a tensor that the pass added."),
        ("calls_a_module", "calls the module act."),
        ("returns_a_string", "The pass returned a str."),
        ("breaks", "failed: KeyError: 'flashinfer_rmsnorm'."),
    ],
)
def test_what_a_pass_must_not_do(program: Program, name: str, sentence: str) -> None:
    before = dump(program)
    with pytest.raises(TransformError) as error:
        _run(program, name)
    assert sentence in str(error.value)
    assert f"external_passes:{name} failed" in str(error.value)
    assert dump(program) == before


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("external_passe:nothing", "there is no Python module external_passe. Did you mean external_passes?"),
        ("torch.fx.passe:x", "there is no Python module torch.fx.passe. Did you mean torch.fx.passes?"),
        ("external_passes:nothin", "external_passes has no nothin. Did you mean nothing?"),
        ("external_passes:Based.cal", "Based has no cal. Did you mean call?"),
        ("external_passes:NUMBER", "external_passes:NUMBER is a int, which cannot be called."),
        ("external_passes:NeedsArguments", "is a class that cannot be instantiated without arguments"),
        ("external_passes:", "external_passes: does not name a pass. Write package.module:callable."),
        ("a b:c", "a b:c does not name a pass."),
    ],
)
def test_names_that_lead_nowhere(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        load_external_pass(text)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_passes.py").write_text("raise RuntimeError('no GPU')\n")
    (tmp_path / "needy_passes.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="importing broken_passes failed: RuntimeError: no GPU"):
        load_external_pass("broken_passes:x")
    with pytest.raises(UsageError, match=r"no Python module no_such_library. needy_passes imports it."):
        load_external_pass("needy_passes:x")


MINE = """
import torch

def gelu(gm):
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.gelu.default
"""


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the current folder is found; the pass runs alone."""
    (tmp_path / "my_own_passes.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    result = CliRunner().invoke(app, ["show", "models:convolutions", "--pass", "my_own_passes:gelu", "--json"])
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)
    assert record["key"] == "my_own_passes:gelu"
    assert (record["matches"], record["changed_nodes"]) == (None, 5), "five calls of tanh, and nobody says sites"
    folder = tmp_path / "dumps"
    shown = ["show", "models:convolutions", "--pass", "my_own_passes:gelu", "--dump", str(folder)]
    result = CliRunner().invoke(app, shown)
    assert "aten.gelu" in result.stdout
    assert "my_own_passes:gelu: [SUMMARY] changed_nodes=5 (matches are not counted)" in result.stderr
    assert (folder / "001_clean_my_own_passes_gelu.py").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--pass", "external_passes:nothin"], 2, "Did you mean nothing?"),
        (["--pass", "external_passes:nothing", "--set", "match_rope.enabled=false"], 2, "is an external pass"),
        (["--pass", "external_passes:drops_an_output"], 6, "The graph has 0 outputs, expected 1"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], code: int, sentence: str) -> None:
    result = CliRunner().invoke(app, ["show", "models:convolutions", *arguments])
    assert result.exit_code == code
    assert sentence in result.stderr
