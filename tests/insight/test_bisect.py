"""Planted faults are found: the transform, the site, or the two that are wrong together."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from inlay.cli.main import app
from inlay.config import resolve_config
from inlay.errors import UsageError
from inlay.frontend import capture
from inlay.insight.bisect import Bisection, load_answers, save_answers
from inlay.insight.oracles import make_oracle
from inlay.transforms import configure
from tests.insight.planted_faults import ALL, SOME, verdicts
from tests.models import llama_folder

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program.program import Program
    from inlay.transforms.pass_manager import TransformStep


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return capture(str(llama_folder(tmp_path_factory.mktemp("llama"), num_hidden_layers=4)))


@pytest.fixture(scope="module")
def steps() -> list[TransformStep]:
    return configure(resolve_config())


@pytest.mark.nightly
def test_planted_faults() -> None:
    kinds = ("stale_value", "pair: order", "external")
    seen = list(verdicts(seed=100, count=len(kinds), architectures=SOME, kinds=kinds))
    assert not [str(verdict) for verdict in seen if not verdict.ok]


@pytest.mark.nightly
def test_sixty_planted_faults() -> None:
    seen = list(verdicts(seed=101, count=60, architectures=ALL))
    assert not [str(verdict) for verdict in seen if not verdict.ok]
    assert len({verdict.architecture for verdict in seen}) >= 6


def _calls(made: Program, name: str) -> list[str]:
    return [node.meta["module"] for node in made.graph.nodes if name in str(node.target)]


def test_a_site_is_the_same_whatever_else_is_left_out(program: Program, steps: list[TransformStep]) -> None:
    """A fused norm is called after how many there are; here it is wrong together with a gate."""

    def good(made: Program) -> bool:
        norm = "model.layers.2.post_attention_layernorm" in _calls(made, "inlay.add_rms_norm")
        return not (norm and "model.layers.3.mlp" in _calls(made, "inlay.swiglu"))

    bisection = Bisection(program, steps, good)
    assert [(each.transform, each.site) for each in bisection.find_all().culprits] == [
        ("match_swiglu", 3),
        ("fuse_add_rms_norm", 4),
    ]


@pytest.mark.nightly  # the next tests have several culprits too
def test_two_sites_of_one_transform(program: Program, steps: list[TransformStep]) -> None:
    bisection = Bisection(program, steps, lambda made: len(_calls(made, "inlay.rope.")) < 5)
    found = bisection.find_all().culprits
    assert {each.transform for each in found} == {"match_rope"}
    assert len(found) == 5, "any five, and never four"
    wanted = {"model.layers.0.mlp", "model.layers.2.mlp"}
    bisection = Bisection(program, steps, lambda made: not wanted <= set(_calls(made, "inlay.swiglu")))
    assert [(each.transform, each.site) for each in bisection.find_all().culprits] == [
        ("match_swiglu", 0),
        ("match_swiglu", 2),
    ]


def test_a_culprit_has_layer_weights_and_source(program: Program, steps: list[TransformStep]) -> None:
    bisection = Bisection(program, steps, lambda made: "model.layers.2.mlp" not in _calls(made, "inlay.swiglu"))
    result = bisection.find_all()
    (culprit,) = result.culprits
    assert (culprit.transform, culprit.site, culprit.layer) == ("match_swiglu", 2, 2)
    assert culprit.weights == ("model.layers.2.mlp.gate_proj.weight", "model.layers.2.mlp.up_proj.weight")
    assert culprit.source.startswith("modeling_llama.py:")
    assert result.is_complete
    assert result.sentences == [
        f"match_swiglu, site 2: {culprit.root}, layer 2, weights {', '.join(culprit.weights)} ({culprit.source})."
    ]
    norms = [each for each in bisection.sites if each.transform == "match_rms_norm"]
    assert [each.layer for each in norms] == [0, 0, 1, 1, 2, 2, 3, 3, None]
    assert norms[-1].weights == ("model.norm.weight",)


def test_several_wrong_sites_are_all_said(program: Program, steps: list[TransformStep]) -> None:
    bad = {"model.layers.0.mlp", "model.layers.3.mlp"}
    good = Bisection(program, steps, lambda made: not bad.intersection(_calls(made, "inlay.swiglu")))
    result = good.find_all()
    assert [[each.site for each in group] for group in result.groups] == [[0], [3]]
    assert result.is_complete
    assert result.sentences[-1].startswith("Several are wrong, each of these by itself: ")
    first = good.find_all(1)
    assert ([each.layer for each in first.culprits], first.is_complete) == ([0], False)
    assert first.right_without == ("match_swiglu",)
    assert first.sentences[-2:] == [
        "More sites are wrong; --all finds every one.",
        "Without match_swiglu the results are right.",
    ]
    rows = result.to_json()["culprits"]
    assert [(row["group"], row["layer"]) for row in rows] == [(0, 0), (1, 3)]


def test_nothing_is_wrong(program: Program, steps: list[TransformStep]) -> None:
    assert Bisection(program, steps, lambda made: True).find_all().culprits == []
    with pytest.raises(UsageError, match="before any transform"):
        Bisection(program, steps, lambda made: False).find_all()


def test_a_bisection_goes_on_where_it_was(program: Program, steps: list[TransformStep], tmp_path: Path) -> None:
    first = Bisection(program, steps, lambda made: len(_calls(made, "inlay.swiglu")) < 2)
    assert [each.site for each in first.find_all(1).culprits] == [0, 1]
    again = Bisection(program, steps, first.oracle, answers=dict(first.answers))
    assert again.find_all(1) == replace(first.find_all(1), runs=0)
    assert again.runs == 0
    file = tmp_path / "answers.json"
    assert load_answers(file, "one") == {}
    save_answers(file, "one", first.answers)
    assert load_answers(file, "one") == first.answers
    assert load_answers(file, "two") == {}, "another model, oracle, option or code"
    for other in ('{"match_rope: all": true}', "no JSON", "[]"):
        file.write_text(other)
        with pytest.raises(UsageError, match=r"does not contain answers of a bisection\. Name another file"):
            load_answers(file, "one")


def spoils_a_gate(module: Any) -> None:
    """A pass of somebody else that gets the third gate wrong."""
    node = [node for node in module.graph.nodes if "swiglu" in str(node.target)][2]
    with module.graph.inserting_after(node):
        new = module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 40.0))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


@pytest.mark.parametrize("oracle", ["logits", pytest.param("tokens", marks=pytest.mark.nightly)])
def test_the_command(oracle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = llama_folder(tmp_path / "model", num_hidden_layers=3)
    repro, state = tmp_path / "repro.py", tmp_path / "state.json"
    options = ["--oracle", oracle, "--pass", "tests.insight.test_bisect:spoils_a_gate", "--state", str(state)]
    options += ["--set", "fuse_gemms.enabled=false"]
    found = CliRunner().invoke(app, ["bisect", str(folder), *options, "-o", str(repro), "--json"])
    assert found.exit_code == 1, found.output
    (culprit,) = json.loads(found.stdout)["culprits"]
    assert culprit["transform"] == "tests.insight.test_bisect:spoils_a_gate"
    assert json.loads(found.stdout)["is_complete"]
    again = CliRunner().invoke(app, ["bisect", str(folder), *options, "--json"])
    assert json.loads(again.stdout)["runs"] == 0
    assert "settings=['fuse_gemms.enabled=false']" in repro.read_text()
    capsys.readouterr()
    runpy.run_path(str(repro))
    assert capsys.readouterr().out.rstrip().endswith(": bad")
    other = CliRunner().invoke(app, ["bisect", str(folder), "--oracle", oracle, "--state", str(state), "--json"])
    assert (other.exit_code, json.loads(other.stdout)["culprits"]) == (0, []), "the answers are those without the pass"


def test_a_command_as_oracle(program: Program, steps: list[TransformStep]) -> None:
    """A program with a fused gate in it is bad, says grep."""
    oracle = make_oracle("sh -c '! grep -q swiglu.default\\( $0'", program)
    (culprit,) = Bisection(program, steps, oracle).find_all(1).culprits
    assert (culprit.transform, culprit.site) == ("match_swiglu", 0)
    with pytest.raises(UsageError, match="cannot be run"):
        make_oracle("no-such-command-anywhere", program)(program)
