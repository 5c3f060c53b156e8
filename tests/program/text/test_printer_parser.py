from __future__ import annotations

import copy
import random
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import InlayError, ProgramError
from inlay.frontend import Example, capture
from inlay.program import Role
from inlay.program.text.folded_printer import dump_folded
from inlay.program.text.parser import load, parse
from inlay.program.text.printer import dump, save
from tests.models import branch
from tests.synthetic_programs import layered

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program import Program

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(branch())


def _inputs(sign: float) -> tuple[torch.Tensor, torch.Tensor]:
    return sign * torch.linspace(0.1, 2, 28).reshape(7, 4), torch.zeros(5, 4)


def _check_same(run: Any, sign: float) -> None:
    """Outputs, the cache the caller passed, and the module's own buffer, over two calls."""
    eager = copy.deepcopy(branch().module)
    mine, theirs = _inputs(sign), _inputs(sign)
    for _ in range(2):
        expected, actual = eager(*theirs), run(*mine)
        assert torch.equal(actual["branched"], expected["branched"])
        assert torch.equal(actual["rest"][0], expected["rest"][0])
        assert torch.equal(mine[1], theirs[1]), "the cache is written in place"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_reload_computes_the_same(program: Program, sign: float) -> None:
    _check_same(program.module(), sign)
    _check_same(parse(dump(program), program.tensors).module(), sign)


def test_dump_of_the_reloaded_is_the_same(program: Program) -> None:
    text = dump(program)
    assert dump(parse(text, program.tensors)) == text


def test_state_is_in_the_binding_table(program: Program) -> None:
    table = {row.name: row for row in program.bindings}
    assert {row.name for row in program.bindings.state} == {"b_count", "cache"}
    aliases = {row.alias.binding: row.alias.kind for row in program.bindings.outs if row.alias}
    assert aliases == {"b_count": "mutated", "cache": "mutated"}
    assert {"branched", "rest.0", "rest.1"} <= table.keys()
    assert table["rest.1"].shape == ("4*batch",)


def test_nested_graphs_are_part_of_everything(program: Program) -> None:
    assert program.op_counts()["aten.softmax.int"] == 1
    for text in (dump(program), dump_folded(program)):
        assert "def true_graph_0(" in text
        assert "softmax" in text
    other = program.copy()
    branches = other.graph.owning_module
    assert branches is not None
    mine = program.graph.owning_module
    assert mine is not None
    assert branches.get_submodule("true_graph_0") is not mine.get_submodule("true_graph_0")


def test_arguments_named_like_builtins() -> None:
    made = capture(Example(torch.nn.Linear(4, 4), (torch.ones(2, 4),), axes={"input": {0: "batch"}}))
    again = parse(dump(made), made.tensors)
    assert [row.name for row in again.bindings.with_role(Role.INPUT)] == ["input"]
    x = torch.randn(3, 4)
    assert torch.equal(again.copy().module()(x), made.module()(x))


def test_source_lines(program: Program) -> None:
    lines = [line for line in dump(program).splitlines() if "aten.index_copy" in line]
    assert "| models.py:" in lines[0]


def test_full_form_is_importable(program: Program, tmp_path: Path) -> None:
    save(program, tmp_path / "full_dump.py")
    code = "import full_dump; print(len(full_dump.INPUTS), callable(full_dump.forward))"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(len(program.bindings.ins)), "True"]


def test_large_constants_go_beside(tmp_path: Path) -> None:
    table = torch.randn(100, 100)

    class Table(torch.nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", table, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.table

    made = capture(Example(Table(), (torch.ones(2, 100),)))
    files = save(made, tmp_path / "table.py")
    assert [file.name for file in files] == ["table.py", "table.safetensors"]
    x = torch.randn(2, 100)
    assert torch.equal(load(files[0]).module()(x), x @ table)
    save(made, tmp_path / "table.py")


@pytest.mark.parametrize("name", ["mine.py", "mine.safetensors"])
def test_files_of_others_are_left_alone(name: str, tmp_path: Path) -> None:
    foreign = tmp_path / name
    foreign.write_text("print('precious')")
    made = layered(2)
    big = torch.zeros(100, 100)

    class Add(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + big

    made = capture(Example(Add(), (torch.ones(100, 100),)))
    with pytest.raises(ProgramError, match="is not an Inlay dump"):
        save(made, tmp_path / "mine.py")
    assert foreign.read_text() == "print('precious')"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_nothing_is_executed(program: Program, tmp_path: Path) -> None:
    text = dump(program)
    marker = tmp_path / "ran"
    attacks = [
        text.replace("    return (", f"    evil = aten.from_file.default({str(marker)!r}, True, 4)\n    return (", 1),
        text.replace("SYMBOLS = {", f"open({str(marker)!r}, 'w')\nSYMBOLS = {{"),
        text.replace("    return (", f"    evil = builtins.open({str(marker)!r}, 'w')\n    return (", 1),
        text.replace("    return (", f"    evil = os.system('touch {marker}')\n    return (", 1),
        text.replace("CONSTANTS = {", f"CONSTANTS = {{'a': open({str(marker)!r}, 'w'),"),
    ]
    for attack in attacks:
        assert attack != text
        with suppress(ProgramError):
            parse(attack)
        assert not marker.exists()


def test_damaged_dumps_are_sentences(program: Program) -> None:
    text = dump(program)
    rng = random.Random(0)
    lines = text.splitlines()
    for _ in range(150):
        damaged = list(lines)
        at = rng.randrange(len(damaged))
        kind = rng.randrange(3)
        if kind == 0:
            del damaged[at]
        elif kind == 1:
            damaged[at] = damaged[at][: rng.randrange(len(damaged[at]) + 1)]
        else:
            damaged[at], damaged[at - 1] = damaged[at - 1], damaged[at]
        try:
            parse("\n".join(damaged))
        except InlayError as error:
            message = str(error)
            if "\n" in message:
                raise AssertionError(message) from error


def test_folded_form_is_not_read_back(program: Program) -> None:
    with pytest.raises(ProgramError, match="folded form"):
        parse(dump_folded(program))


@pytest.mark.parametrize("text", ["", "print(1)", "# inlay program 99: x"])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(ProgramError):
        parse(text)
