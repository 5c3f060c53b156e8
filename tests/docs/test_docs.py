"""What the documents say is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.fast


def _blocks(page: Path) -> list[str]:
    """Python examples that are whole; an excerpt has an ellipsis in it."""
    return [block for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "…" not in block]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_examples_run(page: Path) -> None:
    for block in _blocks(page):
        exec(compile(block, page.name, "exec"), {})


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_names_files_that_exist() -> None:
    for name in re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name
