"""Names: one concept, one class name; nothing of the old vocabulary comes back."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "tools", "examples", "docs")
MAP = tomllib.loads((ROOT / "tools" / "rename_map.toml").read_text())
NESTED = {"Options"}
"""Every transform may have a class of options of its own."""
pytestmark = pytest.mark.fast


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def sources() -> list[Path]:
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def defined(module: ast.Module) -> set[str]:
    """Qualified names of all that a module defines: classes, functions, parameters, fields, attributes, constants."""
    names: set[str] = set()

    def bind(target: ast.AST, prefix: str) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                names.add(prefix + node.id)

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                names.add(prefix + node.name)
                visit(node.body, f"{prefix}{node.name}.")
                stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
                for each in stored:
                    if isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name) and each.value.id == "self":
                        names.add(f"{prefix}{node.name}.{each.attr}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + node.name)
                arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                names.update(f"{prefix}{node.name}({each.arg})" for each in arguments)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    bind(target, prefix)
            elif isinstance(node, ast.AnnAssign):
                bind(node.target, prefix)
            elif isinstance(node, ast.If | ast.Try | ast.With):
                visit([*node.body, *getattr(node, "orelse", [])], prefix)

    visit(module.body, "")
    return names


def test_one_concept_one_class_name() -> None:
    found = defaultdict(list)
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef) and node.name not in NESTED:
                found[node.name].append(file.relative_to(ROOT).as_posix())
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_engine_and_verify_mean_one_thing() -> None:
    """An engine serves requests, alone or in a cluster; verify compares numbers: no other module is called that."""
    for word, home in (("engine", "runtime/engine.py"), ("verify", "insight/verify.py")):
        named = [
            file.relative_to(ROOT / "src/inlay").as_posix()
            for file in (ROOT / "src/inlay").rglob("*.py")
            if word in file.stem.split("_")
            and not any(file.is_relative_to(ROOT / "src/inlay" / name) for name in ("cli", "cluster"))
        ]
        assert named == [home]


def test_what_runs_a_program_is_a_backend() -> None:
    """Below the runtime nothing is called an engine, in messages and docstrings neither."""
    packages = (
        "analysis",
        "build_cache",
        "frontend",
        "config",
        "insight",
        "integrations",
        "lowering",
        "ops",
        "package",
        "program",
        "rewrite",
        "streams",
        "transforms",
    )
    files = [file for name in packages for file in (ROOT / "src/inlay" / name).rglob("*.py")]
    assert [file.name for file in files if re.search(r"\bengines?\b", file.read_text(), re.IGNORECASE)] == []


def test_old_names_are_gone() -> None:
    """No definition that the map renames is left, under its old name in its new home."""
    known = {
        f"{'.'.join(file.relative_to(ROOT / base).with_suffix('').parts).removesuffix('.__init__')}": defined(
            tree_of(file)
        )
        for base, folder in (("src", "src"), ("", "tools"), ("", "examples"))
        for file in (ROOT / folder).rglob("*.py")
    }
    left = []
    for old, new in MAP["names"].items():
        module, _, renamed = new.partition(":")
        name = old.partition(":")[2]
        if "(" in name:
            moved = f"{renamed.partition('(')[0]}({name.partition('(')[2]}"
        else:
            moved = ".".join([*renamed.split(".")[:-1], name.split(".")[-1]])
        if moved in known.get(module, ()):
            left.append(f"{module}:{moved} should be {renamed}")
    assert left == []


def test_old_modules_and_messages_are_gone() -> None:
    """No import and no string names a module by its old path, or says what a message said before."""
    modules, messages = set(MAP["modules"]), tuple(MAP["messages"])
    for file in sources():
        if file == Path(__file__):
            continue
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in modules, f"{file}: {node.module}"
            elif isinstance(node, ast.Import):
                assert modules.isdisjoint(alias.name for alias in node.names), file
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in modules or "." not in node.value, f"{file}: {node.value}"
                said = [each for each in messages if each in node.value]
                assert not said, f"{file}:{node.lineno}: {said[0]!r} is {MAP['messages'][said[0]]!r} now"


def test_the_check_sees_what_is_left() -> None:
    tree = ast.parse("class Piece:\n    plain: bool\n    def run(self, given): self.held = given\nROOM = 3\n")
    assert defined(tree) == {
        "Piece",
        "Piece.plain",
        "Piece.run",
        "Piece.run(self)",
        "Piece.run(given)",
        "Piece.held",
        "ROOM",
    }
