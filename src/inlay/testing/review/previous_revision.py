"""Count the matches of the previous revision of a transform, which git has, in a new process."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.program.text.printer import save
from inlay.transforms import registry

if TYPE_CHECKING:
    from inlay.program.program import Program
    from inlay.transforms.base import Transform

_TIMEOUT = 600
_SCRIPT = """
import importlib.util, sys
from inlay.program.text.parser import load
from inlay.transforms import registry
name, module, file, program, options = sys.argv[1:]
registry().pop(name, None)  # the current revision
spec = importlib.util.spec_from_file_location(module, file)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
cls = registry().get(name) or sys.exit(f"it has no transform {name}")
print(cls(cls.Options.model_validate_json(options)).apply(load(program)).sites)
"""


def previous_sites(transform: Transform, program: Program) -> tuple[int | None, str]:
    """Return the matches of the revision before this one and its name, or None and the reason."""
    if transform.name not in registry():
        return None, "it is not registered"
    file = Path(inspect.getfile(type(transform))).resolve()
    revisions = (_git(file, "log", "-n", "2", "--format=%h", "--", file.name) or "").split()
    if not revisions:
        return None, "neither a lock nor git has an earlier revision"
    is_changed = _git(file, "diff", "--quiet", "HEAD", "--", file.name) is None
    if not is_changed and len(revisions) == 1:
        return None, "git has one revision of it, and no lock has a count"
    revision = revisions[0 if is_changed else 1]
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / file.name
        old.write_text(_git(file, "show", f"{revision}:./{file.name}") or "")
        save(program, Path(folder) / "program.py")
        options = transform.options.model_dump_json()
        words = [transform.name, type(transform).__module__, str(old), f"{folder}/program.py", options]
        paths = os.pathsep.join([str(file.parent), *filter(None, sys.path)])
        try:
            run = _run([sys.executable, "-c", _SCRIPT, *words], env={**os.environ, "PYTHONPATH": paths})
        except subprocess.TimeoutExpired:
            return None, f"revision {revision} did not finish within {_TIMEOUT} s"
    if run.returncode:
        problem = [f"exit code {run.returncode}", *run.stderr.strip().splitlines()][-1]
        return None, f"revision {revision} does not run: {problem}"
    return json.loads(run.stdout.splitlines()[-1]), f"revision {revision}"


def _git(file: Path, *words: str) -> str | None:
    """Return what git prints in the folder of a file, or None if it fails."""
    try:
        run = _run(["git", *words], cwd=file.parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout if run.returncode == 0 else None


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT, **options)
