"""docs/stages.md names every test file under exactly one stage, and has a recipe and torch's options for each stage."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._logging._internal import log_registry

import inlay.testing

ROOT = Path(__file__).parents[2]
STAGES = (
    "Capture and guards",
    "Functionalization and decompositions",
    "Post-grad shaping",
    "Fusion",
    "Codegen",
    "Runtime",
    "Caching",
)
CHECKS = {
    "assert_in_place",
    "assert_no_recompiles",
    "cache_round_trip",
    "check_model",
    "generated_code",
    "post_grad_graphs",
}
pytestmark = pytest.mark.fast


def _sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", (ROOT / "docs" / "stages.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_test_is_named_once() -> None:
    named = Counter(name for text in _sections().values() for name in re.findall(r"`(tests/[\w/]+\.py)`", text))
    found = {file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(found - set(named)) == [], "add these to the stage they are about"
    assert sorted(set(named) - found) == [], "these do not exist"
    assert [name for name, count in named.items() if count > 1] == [], "a test belongs to one stage"


def test_every_stage_has_a_recipe_and_tests() -> None:
    sections = _sections()
    assert tuple(sections)[: len(STAGES)] == STAGES
    for stage in STAGES:
        recipes = re.findall(r"```python\n(.*?)```", sections[stage], re.DOTALL)
        assert recipes, f"{stage} has no recipe"
        assert all("inlay.testing" in recipe and "…" not in recipe for recipe in recipes), f"{stage}: CI skips it"
        assert "tests/testing/" in sections[stage], f"{stage} has no tests of its own"


def test_every_check_has_a_recipe() -> None:
    page = (ROOT / "docs" / "stages.md").read_text()
    used = {name for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) for name in re.findall(r"\w+", block)}
    assert CHECKS - used == set()
    assert set(inlay.testing.__all__) >= CHECKS


def _is_known(name: str) -> bool:
    """Whether the installed torch has this option, environment variable or log."""
    if name.startswith("torch."):
        module, option = name.split(".config.")
        found: Any = importlib.import_module(f"{module}.config")
        *classes, last = option.split(".")
        for each in classes:
            found = getattr(found, each)
        return hasattr(found, last)
    if name.isupper():
        return any(f'"{name}"' in (Path(torch.__file__).parent / file).read_text() for file in READERS)
    return log_registry.is_log(name) or log_registry.is_artifact(name)


READERS = ("_dynamo/config.py", "_inductor/config.py", "_inductor/runtime/cache_dir_utils.py")
"""Where torch reads its environment."""


def test_options_of_torch_exist() -> None:
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", _sections()["torch's own tests and options"], re.MULTILINE
    )
    stages = {stage: cells for stage, *cells in rows[1:]}
    assert tuple(stages) == tuple(each.lower() for each in STAGES)
    for stage, (tests, logs, options) in stages.items():
        assert all(re.fullmatch(r"`test/[\w/]+\.py`", each) for each in tests.split(", ")), stage
        named = re.findall("`([^`]+)`", f"{logs} {options}")
        assert [each for each in named if not _is_known(each)] == [], stage
    for invented in ("torch._inductor.config.no_such_option", "TORCHINDUCTOR_NO_SUCH_VARIABLE", "no_such_log"):
        assert not _is_known(invented)
