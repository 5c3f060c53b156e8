"""Traced patterns, and the list of transforms, are kept between runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay import derived_cache, machine
from inlay.cli import passes
from inlay.rewrite import pattern_cache, pattern_trees
from inlay.rewrite.pattern_cache import PatternCache, parse_tree, tree_lines
from inlay.rewrite.rule import Rule
from inlay.transforms.base import find_transform
from inlay.transforms.library.match_swiglu import MatchSwiGLU

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.rewrite.rule import Alternative

pytestmark = pytest.mark.fast
RULES = ("match_rms_norm", "match_rope", "match_swiglu", "match_softmax_attention")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(derived_cache, "source_key", lambda: "key")
    monkeypatch.setattr(derived_cache, "_is_enabled", True)
    return tmp_path / "inlay" / "derived" / "key"


def _alternatives(*names: str) -> list[Alternative]:
    rules: list[Any] = [find_transform(name)() for name in names]
    return [each for rule in rules for each in rule.alternatives({torch.float32, torch.bfloat16})]


def _trace(cache: PatternCache, *names: str) -> list[Any]:
    found = _alternatives(*names)
    cache.trace((each.function, each.example) for each in found)
    return [tree_lines(cache.get(each.function, each.example)) for each in found]


def _no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(patterns: Any) -> Any:
        raise AssertionError("traced again")

    for module in (pattern_cache, pattern_trees):
        monkeypatch.setattr(module, "trace_patterns", fail)


def test_a_second_run_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _trace(PatternCache(), *RULES)
    _no_tracing(monkeypatch)
    assert _trace(PatternCache(), *RULES) == first
    assert len(first) == len(_alternatives(*RULES)) > len(RULES)


def test_a_tree_is_read_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators, constants and variables are the same objects or equal, and a value that is used twice is one call."""
    found, cache = _alternatives(*RULES), PatternCache()
    for each in found:
        tree = cache.get(each.function, each.example)
        made = parse_tree(tree_lines(tree), tree.variables)
        assert (made.num_calls, made.variables) == (tree.num_calls, tree.variables)
        seen: dict[Any, Any] = {}

        def compare(one: Any, two: Any, seen: dict[Any, Any] = seen) -> None:
            assert type(one) is type(two)
            if isinstance(one, pattern_trees.PatternCall):
                if one in seen:
                    assert seen[one] is two
                    return
                seen[one] = two
                assert one.target is two.target
                assert [name for name, _ in one.args] == [name for name, _ in two.args]
                for (_, left), (_, right) in zip(one.args, two.args, strict=True):
                    compare(left, right)
            elif isinstance(one, list):
                for left, right in zip(one, two, strict=True):
                    compare(left, right)
            else:
                assert one == two

        for one, two in zip(tree.outputs, made.outputs, strict=True):
            compare(one, two)
        assert len(seen) == tree.num_calls


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("aten.silu.default", "aten.relu.default"),
        lambda text: "[]",
        lambda text: "\x00",
    ],
    ids=["truncated", "changed", "another form", "no JSON"],
)
def test_a_damaged_file_is_not_used(folder: Path, damage: Any) -> None:
    first = _trace(PatternCache(), "match_swiglu")
    file = folder / "patterns.json"
    assert "aten.silu.default" in file.read_text()
    file.write_text(damage(file.read_text()))
    assert derived_cache.read("patterns") is None
    assert _trace(PatternCache(), "match_swiglu") == first
    assert derived_cache.read("patterns") is not None, "it is written again"


def test_a_tree_that_cannot_be_read_is_traced(folder: Path) -> None:
    first = _trace(PatternCache(), "match_swiglu")
    held = derived_cache.read("patterns")
    derived_cache.write("patterns", {name: [[["aten.no_such_operator.default", []]], ["c_0"]] for name in held})
    assert _trace(PatternCache(), "match_swiglu") == first


def test_only_rules_of_inlay_are_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rules may depend on code that is not part of the key."""

    class Other(MatchSwiGLU):
        pass

    class Local(Rule):
        def pattern(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() + 1

        def examples(self, dtype: torch.dtype) -> dict[str, Any]:
            return {"x": torch.ones(3, dtype=dtype)}

    monkeypatch.setattr(MatchSwiGLU, "pattern", lambda self, gate, up: torch.relu(gate) * up)
    for rule in (Other(), Local(), MatchSwiGLU()):
        for each in rule.alternatives({torch.float32}):
            PatternCache().get(each.function, each.example)
    assert not folder.exists()


def test_modes_of_torch_are_part_of_the_name() -> None:
    names = []
    (each,) = [each for each in _alternatives("match_swiglu") if each.example["gate"].dtype is torch.float32]
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with mode:
            names.append(pattern_cache._stored_name(each.function, each.example))
    assert len(set(names)) == 4
    assert all(names)


def test_a_function_that_a_pattern_calls_is_part_of_the_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that calls a replaced function is neither stored nor taken for the stored one."""
    first = _trace(PatternCache(), "match_swiglu")
    monkeypatch.setattr(MatchSwiGLU, "activation", staticmethod(lambda gate: gate.tanh()))
    assert _trace(PatternCache(), "match_swiglu") != first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[2]))
    monkeypatch.setattr(derived_cache, "source_key", lambda: "key")
    monkeypatch.setattr(derived_cache, "_is_enabled", True)
    assert _trace(PatternCache(), "match_swiglu") == first


def test_the_name_changes_with_the_loaded_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the code comes from a file of Inlay, as with a stale file of bytecode."""
    from inlay.transforms.library.match_geglu import MatchGeGLU

    (each,) = [each for each in _alternatives("match_swiglu") if each.example["gate"].dtype is torch.float32]
    before = pattern_cache._stored_name(each.function, each.example)
    monkeypatch.setattr(MatchSwiGLU, "activation", vars(MatchGeGLU)["activation"])
    after = pattern_cache._stored_name(each.function, each.example)
    assert before
    assert after
    assert before != after


def test_only_commands_use_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_cache, "_is_enabled", False)
    _trace(PatternCache(), "match_swiglu")
    assert derived_cache.read("patterns") is None
    assert not folder.exists()


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", no_home)
    derived_cache.write("value", 1)
    assert derived_cache.read("value") is None


def test_when_there_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    key = derived_cache.source_key.__wrapped__
    start = machine.process_start_time()
    monkeypatch.setattr(derived_cache, "_PACKAGE", tmp_path)
    assert key() == "", "an archive has no source files"
    file = tmp_path / "module.py"
    file.write_text("")
    assert key() == "", "it is newer than this process"
    os.utime(file, (start - 10, start - 10))
    assert key() == "", "it was copied since, with an old modification time"
    monkeypatch.setattr(machine, "process_start_time", lambda: start + 1e6)
    first = key()
    file.write_text("x = 1")
    assert "" != first != key() != ""


def test_a_folder_of_another_user_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    derived_cache.write("patterns", {"a": 1})
    assert derived_cache.read("patterns") == {"a": 1}
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert derived_cache.read("patterns") is None


def test_old_keys_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(6):
        monkeypatch.setattr(derived_cache, "source_key", lambda index=index: f"key{index}")
        derived_cache.write("value", index)
        os.utime(folder.parent / f"key{index}", (index, index))
    assert sorted(each.name for each in folder.parent.iterdir()) == ["key2", "key3", "key4", "key5"]
    assert derived_cache.clear() > 0
    assert not list(folder.parent.iterdir())


def test_old_values_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_cache, "_MAX_VALUES", 3)
    for index in range(5):
        derived_cache.write(f"value{index}", index)
        os.utime(folder / f"value{index}.json", (index, index))
    derived_cache.write("value5", 5)
    assert sorted(each.name for each in folder.iterdir()) == ["value3.json", "value4.json", "value5.json"]


def test_the_list_of_transforms_needs_no_torch(tmp_path: Path) -> None:
    """The first process writes the list. The second one prints it without importing torch."""
    code = """
import json, sys
from inlay import derived_cache
from inlay.cli.passes import list_transforms
derived_cache.enable()
rows = list_transforms()
print(json.dumps([rows, "torch" in sys.modules]))
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    said = [
        json.loads(
            subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        )
        for _ in range(2)
    ]
    assert said[0][0] == said[1][0] == passes.list_transforms()
    assert [loaded for _, loaded in said] == [True, False]


def test_transforms_of_other_packages_are_not_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "entry_points", lambda group: ["mine"])
    derived_cache.write("transforms", [{"name": "old"}])
    assert passes.list_transforms()[0]["name"] == "clean_noops"
    assert derived_cache.read("transforms") == [{"name": "old"}]
