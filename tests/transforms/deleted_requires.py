"""Delete each single condition of each rule and see whether a test or the fuzzer notices.

    python tests/transforms/deleted_requires.py            # a table; exit code 1 if a deletion went unnoticed

A condition is a `site.require(…)` of a rule or of the engine, or an `if …: return "reason"` of a `_refuse`. The source
is copied, the condition taken out of the copy, and the tests of that transform run on it; where they pass, the fuzzer.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "inlay"
FILES = (*sorted((SOURCE / "transforms" / "library").glob("[!_]*.py")), SOURCE / "rewrite" / "engine.py")
GRAPHS = 400


@dataclass(frozen=True)
class Condition:
    """A statement that keeps a rule from firing."""

    file: Path
    line: int
    end: int
    column: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.file.stem}:{self.line}"


def conditions(file: Path) -> list[Condition]:
    tree = ast.parse(file.read_text())
    found: list[ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute) and function.attr == "require":
                found.append(node)
        elif isinstance(node, ast.FunctionDef) and node.name == "_refuse":
            found += [
                each for each in ast.walk(node) if isinstance(each, ast.If) and isinstance(each.body[-1], ast.Return)
            ]
    return [
        Condition(file, each.lineno, each.end_lineno or each.lineno, each.col_offset, _reason(each)) for each in found
    ]


def _reason(statement: ast.stmt) -> str:
    texts = [
        each.value for each in ast.walk(statement) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    return next((text.strip() for text in texts if " " in text), "")


def noticed_by(condition: Condition) -> str:
    """What fails without the condition: a test, the fuzzer, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "inlay"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        lines = condition.file.read_text().splitlines()
        lines[condition.line - 1 : condition.end] = [" " * condition.column + "pass"]
        (copy / condition.file.relative_to(SOURCE)).write_text("\n".join(lines) + "\n")
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        engine = condition.file.stem == "engine"
        chosen = ["tests/transforms/test_rewrite.py"] if engine else ["-k", f"{condition.file.stem}-"]
        tests = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/transforms/test_harness.py", *chosen]
        if _fails(tests, environment):
            return "a test"
        only = [] if engine else ["--pass", condition.file.stem]
        fuzz = ["-m", "inlay.testing.fuzz", "--graphs", str(GRAPHS), "--seed", "11", "-o", folder, *only]
        return "the fuzzer" if _fails(fuzz, environment) else "nothing"


def _fails(arguments: list[str], environment: dict[str, str]) -> bool:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True).returncode != 0


def main(names: list[str]) -> int:
    every = [each for file in FILES if not names or file.stem in names for each in conditions(file)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(noticed_by, every))
    print("| condition | reason it states | without it, noticed by |\n|---|---|---|")
    for condition, result in zip(every, results, strict=True):
        print(f"| {condition.where} | {condition.text} | {result} |")
    missed = results.count("nothing")
    print(f"\n{len(every)} conditions, {missed} of them could be deleted unnoticed.")
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
