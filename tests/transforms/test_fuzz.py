"""The fuzzer: a thousand places in CI, a hundred thousand and the deletion of every condition in the nightly tier."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.testing.fuzz.__main__ import run
from inlay.testing.fuzz.check import check
from inlay.testing.fuzz.grow import grow
from inlay.testing.fuzz.reduce import reduced, script
from inlay.testing.fuzz.templates import Templates
from inlay.transforms import registry
from inlay.transforms.library.match_swiglu import MatchSwiGLU

if TYPE_CHECKING:
    from inlay.rewrite import Site


def _assert_sound(report: dict[str, Any], places: int, fired: int) -> None:
    assert report["failures"] == []
    assert report["places"] >= places
    # A transform that adds inputs needs sizes that change, which these graphs have not: test_kv_refusals grows its own.
    seldom = {name: counts["fired"] for name, counts in report["transforms"].items() if counts["fired"] < fired}
    assert {name for name in seldom if not registry()[name].adds_inputs} == set()


def test_a_thousand_places(tmp_path: Path) -> None:
    _assert_sound(run(200, 0, [], tmp_path), places=1_000, fired=5)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
def test_fifty_thousand_places(seed: int, tmp_path: Path) -> None:
    """Twice: a hundred thousand."""
    _assert_sound(run(10_000, seed, [], tmp_path), places=50_000, fired=500)


@pytest.mark.nightly
def test_no_condition_can_be_deleted_unnoticed() -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("deleted_requires.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.fast
def test_the_same_seed_grows_the_same_graph() -> None:
    templates = Templates(["match_swiglu"])
    one, two = (grow(random.Random("1/2"), templates.draw) for _ in range(2))
    assert str(one[0].graph) == str(two[0].graph)
    assert all(torch.equal(value, two[1][name]) for name, value in one[1].items())


@pytest.mark.fast
def test_a_wrong_rule_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def anything(self: MatchSwiGLU, site: Site) -> None:
        pass

    monkeypatch.setattr(MatchSwiGLU, "check", anything)
    monkeypatch.setattr(MatchSwiGLU, "replacement", lambda self, gate, up: torch.ops.inlay.swiglu(up, gate))
    templates = Templates(["match_swiglu"])
    for index in range(200):
        program, inputs, _ = grow(random.Random(f"3/{index}"), templates.draw)
        found = check(program, inputs, ["match_swiglu"])
        if found is not None:
            break
    assert found is not None
    small = reduced(found)
    calls = [node for node in small.program.graph.nodes if node.op == "call_function"]
    assert len(calls) == 2
    file = tmp_path / "repro.py"
    file.write_text(script(small, "a test"))
    done = subprocess.run([sys.executable, file], capture_output=True, text=True)
    assert done.stdout == "the numbers agree\n", "the rule is only wrong in this process"
    assert done.returncode == 0


@pytest.mark.fast
def test_every_transform_has_templates() -> None:
    assert set(Templates().keys) == set(registry())
