"""The site: complete, built strictly, and tutorials whose commands print what they say."""

from __future__ import annotations

import doctest
import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
import yaml

from inlay.cli.main import app
from inlay.transforms import registry

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SLOW_TUTORIALS = ("in_place_state", "my_pattern_stopped_matching", "package_and_run", "why_did_it_not_match")
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def _reference() -> Any:
    spec = importlib.util.spec_from_file_location("site_reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = _reference()


def _commands() -> list[tuple[str, Any]]:
    return list(reference._commands(typer.main.get_command(app), "inlay"))


def _own() -> list[Any]:
    return [cls for cls in registry().values() if cls.__module__.startswith("inlay.")]


# What is there


def _nav(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from _nav(value) if isinstance(value, list) else [value]


@pytest.mark.fast
def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(_nav(config["nav"]))
    written = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    left_out = set(config.get("not_in_nav", "").split())
    assert sorted(written | set(reference.pages())) == sorted({*listed, *left_out})
    assert len(listed) == len(set(listed)), "a page stands in the navigation twice"


@pytest.mark.fast
def test_generated_pages_are_not_committed() -> None:
    assert not [path for path in reference.pages() if (DOCS / path).exists()]


@pytest.mark.fast
@pytest.mark.parametrize(("name", "command"), _commands())
def test_every_command_has_an_entry(name: str, command: Any) -> None:
    entry = reference.commands().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert f"```bash\n{name}" in entry, f"{name} --help has no example"
    for option in (option for each in command.params for option in each.opts if option.startswith("--")):
        assert f"{option}" in entry
    assert "[bold]" not in entry


@pytest.mark.fast
@pytest.mark.parametrize("cls", _own(), ids=lambda cls: cls.name)
def test_every_transform_has_an_entry(cls: Any) -> None:
    page = reference.transforms()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| [`{cls.name}`]"))
    assert cls.summary()
    assert f"| {cls.summary()} |" in row
    entry = page.partition(f"\n## {cls.name}\n")[2].partition("\n## ")[0]
    assert cls.summary() in entry
    assert "```text" in entry


@pytest.mark.fast
@pytest.mark.parametrize("package", reference.PACKAGES)
def test_every_public_name_has_an_entry(package: str) -> None:
    page = reference.python(package)
    module = importlib.import_module(f"inlay.{package}" if package else "inlay")
    for name in (name for name in module.__all__ if not name.startswith("__")):
        entry = page.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
        assert re.sub(r"```.*?```|^###.*", "", entry, flags=re.DOTALL).strip(), (
            f"inlay.{package}.{name} has no docstring"
        )
    assert " at 0x" not in page
    assert not re.search(r"= ?[,)]", "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))), "a lost default"


@pytest.mark.fast
def test_examples_in_the_generator() -> None:
    result = doctest.testmod(reference)
    assert result.attempted > 3
    assert not result.failed


@pytest.mark.fast
def test_start_page_has_sections_of_the_readme() -> None:
    sections = reference.sections((ROOT / "README.md").read_text())
    wanted = reference._SECTION.findall((DOCS / "index.md").read_text())
    assert wanted
    assert set(wanted) <= set(sections)
    assert "](docs/" not in sections["the-problem"]
    exceptions = pytest.importorskip("mkdocs.exceptions", reason="pip install -e '.[docs]'")
    with pytest.raises(exceptions.PluginError, match=r"README\.md has no section #gone\. It has inlay, the-problem, "):
        reference._from_readme(sections, "gone")


# What is built


def _build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("material") is None:
        if os.environ.get("CI"):
            pytest.fail("mkdocs-material is not installed; pip install -e '.[dev]' brings it")
        pytest.skip("pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that CI has built, or one that is built here."""
    if os.environ.get("INLAY_SITE"):
        return ROOT / os.environ["INLAY_SITE"]
    target = tmp_path_factory.mktemp("site")
    run = _build(ROOT, target)
    assert run.returncode == 0, run.stderr
    return target


def test_site_is_built_and_fetches_nothing(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for page in pages:
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\s\">]+)", text)
        assert not fetched, f"{page.name} fetches {fetched}"
    assert not re.findall(r"@import|url\((?:https?:)?//", (site / "site.css").read_text())
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f'id="{name.replace(" ", "-")}"' in commands for name, _ in _commands())
    listed = html.unescape(re.sub(r"<[^>]+>", "", (site / "reference" / "transforms.html").read_text()))
    assert all(cls.summary().replace("`", "") in listed for cls in _own())
    assert not list(site.rglob("*.py"))


@pytest.mark.nightly
def test_a_strict_build_refuses(tmp_path: Path) -> None:
    """All that the site is checked for is found when it is wrong."""
    shutil.copytree(DOCS, tmp_path / "docs")
    for name in ("mkdocs.yml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    with (tmp_path / "docs" / "hardware.md").open("a") as page:
        page.write("\n[a](gone.md) [b](cli.md#gone) [c](../src/gone.py) [d](../README.md)\n")
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    run = _build(tmp_path, tmp_path / "site")
    assert run.returncode != 0
    for sentence in ("gone.md", "'cli.md#gone'", "../src/gone.py", "lost.md"):
        assert sentence in run.stderr, run.stderr
    assert "README.md" not in run.stderr, "a file outside docs/ that exists is no error"


@pytest.mark.fast
def test_nothing_of_the_site_is_packed() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="pip install -e '.[dev]' brings hatchling")
    packed = [file.relative_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()]
    assert packed
    assert all(path.startswith("src/inlay/") for path in packed)
    assert "/site/" in (ROOT / ".gitignore").read_text().splitlines()


# What the tutorials say


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What MODEL is in a tutorial: small, with random weights and a tokenizer."""
    from tests.models import random_model
    from tests.small_packages import FIELDS
    from tests.text_models import byte_tokenizer

    folder = tmp_path_factory.mktemp("model")
    random_model(FIELDS).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.nightly if page.stem in SLOW_TUTORIALS else (), id=page.stem)
        for page in TUTORIALS
    ],
)
def test_tutorial(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In an empty folder: code with a title becomes a file, bash is run, text is what was printed just before."""
    text = page.read_text()
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": scripts, "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1"}
    if "$MODEL" in text:
        environment["MODEL"] = str(request.getfixturevalue("model"))
    printed, ran = "", 0
    for kind, title, block in _BLOCK.findall(text):
        if title:
            (tmp_path / title).write_text(block)
        elif kind == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block]
            run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
            assert run.returncode == 0, f"{block}\n{run.stdout}{run.stderr}"
            printed, ran = _words(run.stdout), ran + 1
        else:
            assert kind == "text", f"{page.name} has a block of {kind} that nobody runs"
            for line in filter(None, map(_words, block.splitlines())):
                assert line in printed, f"{page.name}: {line!r} was not printed, but\n{printed}"
    assert ran > 1


def _words(text: str) -> str:
    """Without the spaces that tables are laid out with."""
    return " ".join(text.split())
