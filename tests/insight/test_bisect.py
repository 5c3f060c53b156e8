"""Planted faults are found: the transform, the site, or the two that are wrong together."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from inlay.capture import capture
from inlay.cli.main import app
from inlay.config import resolve
from inlay.errors import UsageError
from inlay.insight.bisect import Bisection, load_answers, reproduce
from inlay.insight.oracles import find_oracle
from inlay.insight.running import Runner, random_inputs
from inlay.transforms import configure
from inlay.transforms.pipeline import Step, run
from models import llama_folder

if TYPE_CHECKING:
    from pathlib import Path

    from torch import fx

    from inlay.program.program import Program
    from inlay.transforms.base import Applied

RULES = ("match_rms_norm", "match_attention", "match_rope", "match_swiglu", "fuse_add_rms_norm", "clean_noops")
KINDS: dict[str, Any] = {
    "scaled": lambda value: value * 1.5,
    "negated": lambda value: -value,
    "shifted": lambda value: value + 0.5,
    "rounded": lambda value: value.round(decimals=1),
    "bounded": lambda value: value.clamp(max=0.01),
    "squared": lambda value: value * value,
    "zeroed": lambda value: value * 0,
    "turned": lambda value: value.flip(-1),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return capture(str(llama_folder(tmp_path_factory.mktemp("llama"), num_hidden_layers=4)))


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return [step for step in configure(resolve()) if step.key in RULES]


class Planted:
    """What transforms made of a program is right, but where a fault was planted."""

    def __init__(self, faults: dict[str, set[str]], kind: str) -> None:
        self.faults, self.kind = faults, kind
        """Transform → names of places that are wrong if all of the faults are there."""

    def oracle(self, program: Program) -> Any:
        runner, inputs = Runner(), random_inputs(program)
        expected = runner(program, inputs)

        def good(made: Program) -> bool:
            results = runner(self.spoiled(made), inputs)
            return all(
                torch.allclose(one, two, rtol=1e-3, atol=1e-5) for one, two in zip(expected, results, strict=True)
            )

        return good

    def spoiled(self, made: Program) -> Program:
        """The program with the fault in it, if everything that the fault needs was rewritten."""
        marks = [node.meta.get("planted") for node in made.graph.nodes if node.meta.get("planted")]
        wanted = {(name, place) for name, places in self.faults.items() for place in places}
        if not wanted <= set(marks):
            return made
        copy = made.copy()
        last = [node for node in copy.graph.nodes if node.meta.get("planted") in wanted][-1]
        _spoil(copy.graph, last, KINDS[self.kind])
        return copy


def _spoil(graph: fx.Graph, node: fx.Node, change: Any) -> None:
    value = node.meta["val"]
    target = next(iter(node.users)) if isinstance(value, (tuple, list)) else node
    with graph.inserting_after(target):
        new = graph.call_function(change, (target,))
    new.meta = dict(target.meta)
    target.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def marking(step: Step) -> Step:
    """The step, marking what it made at each place."""
    cls = type(step.transform)

    class Marking(cls):  # type: ignore[misc, valid-type]
        def apply(self, program: Program) -> Applied:
            before = set(program.graph.nodes)
            sources = {node.name: list(node.users) for node in program.graph.nodes}
            applied: Applied = super().apply(program)
            made = [node for node in applied.program.graph.nodes if node not in before]
            for place, node in zip(applied.places, _anchors(made, applied), strict=False):
                node.meta["planted"] = (self.name, place)
            if not made:  # a clean-up makes nothing: whoever read what is gone carries the mark
                for place in applied.places:
                    for user in sources[place]:
                        if user.op == "call_function" and user in applied.program.graph.nodes:
                            user.meta["planted"] = (self.name, place)
            return applied

    transform = object.__new__(Marking)
    transform.__dict__.update(step.transform.__dict__)
    return Step(step.key, transform)


def _anchors(made: list[fx.Node], applied: Applied) -> list[fx.Node]:
    """One node for each site, in order: the call of the canonical operator."""
    return [node for node in made if str(node.target).startswith("inlay.")]


def _faults(program: Program, steps: list[Step], seed: int, two: bool) -> tuple[Bisection, list[tuple[str, str]], int]:
    """A bisection with faults that are drawn until they change the results, what it must find, and among how many."""
    chooser = random.Random(seed)
    _, records = run(program, steps)
    able = [record for record in records if record.places and record.key != "clean_noops"]
    sites = sum(record.sites for record in records)
    everything = {step.key: None for step in steps}
    for _ in range(20):
        chosen = chooser.sample(able, 2 if two else 1)
        chosen.sort(key=lambda record: [step.key for step in steps].index(record.key))
        faults = {record.key: {chooser.choice(record.places)} for record in chosen}
        planted = Planted(faults, chooser.choice(list(KINDS)))
        bisection = Bisection(program, steps, planted.oracle(program))
        if not bisection.good(everything):
            return bisection, [(key, min(places)) for key, places in faults.items()], sites
    raise AssertionError("no fault changes the results")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
def test_planted_faults(program: Program, steps: list[Step], seed: int, two: bool) -> None:
    bisection, wanted, sites = _faults(program, [marking(step) for step in steps], seed, two)
    assert [(each.transform, each.place) for each in bisection.find()] == wanted
    assert bisection.runs <= 2 * math.log2(sites) + 10


def test_nothing_is_wrong(program: Program, steps: list[Step]) -> None:
    assert Bisection(program, steps, lambda made: True).find() == []
    with pytest.raises(UsageError, match="before any transform"):
        Bisection(program, steps, lambda made: False).find()


def test_a_bisection_goes_on_where_it_was(program: Program, steps: list[Step], tmp_path: Path) -> None:
    first, wanted, _ = _faults(program, [marking(step) for step in steps], 1, two=False)
    assert [(each.transform, each.place) for each in first.find()] == wanted
    again = Bisection(program, first.steps, first.oracle, answers=dict(first.answers))
    assert again.find() == first.find()
    assert again.runs == 0
    assert load_answers(tmp_path / "none.json") == {}


def spoils_a_gate(module: Any) -> None:
    """A pass of somebody else that gets the third gate wrong."""
    node = [node for node in module.graph.nodes if "swiglu" in str(node.target)][2]
    with module.graph.inserting_after(node):
        new = module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 40.0))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


@pytest.mark.parametrize("oracle", ["logits", "tokens"])
def test_the_command(oracle: str, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model", num_hidden_layers=4)
    repro, state = tmp_path / "repro.py", tmp_path / "state.json"
    options = ["--oracle", oracle, "--pass", "insight.test_bisect:spoils_a_gate", "--state", str(state)]
    found = CliRunner().invoke(app, ["bisect", str(folder), *options, "-o", str(repro), "--json"])
    assert found.exit_code == 1, found.output
    (culprit,) = json.loads(found.stdout)["culprits"]
    assert culprit["transform"] == "insight.test_bisect:spoils_a_gate"
    again = CliRunner().invoke(app, ["bisect", str(folder), *options, "--json"])
    assert json.loads(again.stdout)["runs"] == 0
    assert "reproduce(" in repro.read_text()
    assert reproduce(str(folder), {culprit["transform"]: None}, oracle=oracle)
    assert CliRunner().invoke(app, ["bisect", str(folder), "--oracle", oracle]).exit_code == 0


def test_a_command_as_oracle(program: Program, steps: list[Step]) -> None:
    """A program with a fused gate in it is bad, says grep."""
    oracle = find_oracle("sh -c '! grep -q swiglu.default\\( $0'", program)
    (culprit,) = Bisection(program, steps, oracle).find()
    assert (culprit.transform, culprit.site) == ("match_swiglu", 0)
    with pytest.raises(UsageError, match="cannot be run"):
        find_oracle("no-such-command-anywhere", program)(program)
