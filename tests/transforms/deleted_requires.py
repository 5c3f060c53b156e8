"""Delete each single condition of each rule and see whether a test or the fuzzer notices.

    python tests/transforms/deleted_requires.py            # a table; exit code 1 if a deletion went unnoticed

A condition is a `site.require(…)` of a rule or of the engine, or an `if …: return "reason"` of a `_refuse`. The source
is copied, the condition taken out of the copy, and the tests of that transform run on it; where they pass, the fuzzer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inlay.testing.broken import Condition, conditions

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "inlay"
FILES = (*sorted((SOURCE / "transforms" / "library").glob("[!_]*.py")), SOURCE / "rewrite" / "engine.py")
GRAPHS = 400


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
