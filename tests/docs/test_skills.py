"""The skills, followed to the letter: every command of them is run. The plugin that contains them is valid."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
import yaml

from inlay import __version__
from inlay.cli.main import app
from tests.models import llama_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
SKILLS = ROOT / "skills"
NAMES = sorted(each.name for each in SKILLS.iterdir())
SECTIONS = ("When to use", "Inputs and outputs", "Workflow", "Guardrails")
PLUGIN_FILES = ("plugin", "marketplace")
KEBAB = r"[a-z0-9]+(-[a-z0-9]+)*"


def _commands(skill: str) -> list[str]:
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", (SKILLS / skill / "SKILL.md").read_text(), re.DOTALL | re.MULTILINE)
    return [line.strip() for block in blocks for line in block.strip().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds the example."""
    shutil.copy(ROOT / "examples" / "mixer.py", tmp_path)
    return tmp_path


def _follow(skill: str, folder: Path, **variables: str) -> str:
    """Run the commands one after the other in a folder; what they printed."""
    return "".join(_run(command, folder, variables) for command in _commands(skill))


def _run(command: str, folder: Path, variables: Mapping[str, str]) -> str:
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "COLUMNS": "120", **variables}
    given = ["bash", "-c", f"set -euo pipefail; {command}"]
    done = subprocess.run(given, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def _parts(text: str) -> tuple[dict[str, Any], str]:
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    return yaml.safe_load(front), body


def _faults(skill: str, text: str) -> list[str]:
    """What the Agent Skills format, and this repository, do not allow in the front matter."""
    fields, _ = _parts(text)
    given = fields.get("metadata", {})
    allowed = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    rules = {
        "only the fields of the format": set(fields) <= allowed,
        "the name of the folder": fields["name"] == skill and re.fullmatch(KEBAB, skill) and len(skill) <= 64,
        "a description that says when": 80 < len(fields["description"]) <= 1024 and " Use " in fields["description"],
        "the license": fields.get("license") == "Apache-2.0",
        "what it needs": 0 < len(fields.get("compatibility", "")) <= 500,
        "metadata of strings": all(isinstance(each, str) for each in (*given, *given.values())),
        "the version of Inlay": given.get("version") == __version__,
        "tags": len(given.get("tags", "").split(", ")) >= 3,
    }
    return [name for name, holds in rules.items() if not holds]


@pytest.mark.fast
@pytest.mark.parametrize("skill", NAMES)
def test_front_matter_and_sections(skill: str) -> None:
    text = (SKILLS / skill / "SKILL.md").read_text()
    assert _faults(skill, text) == []
    _, body = _parts(text)
    assert tuple(re.findall(r"^## (.*)$", body, re.MULTILINE)) == SECTIONS
    assert len(_commands(skill)) >= 4
    assert len(text.splitlines()) < 500
    known = set(re.findall(r"skills? ((?:[\w-]+(?:, | and )?)+)", body.replace("\n", " ")))
    for name in {word for group in known for word in re.split(", | and ", group) if "-" in word}:
        assert name in NAMES, f"there is no skill {name}"


@pytest.mark.fast
def test_faults_of_front_matter_are_found() -> None:
    text = (SKILLS / "graph-dump" / "SKILL.md").read_text()
    for old, new, fault in (
        ("name: graph-dump", "name: Graph-Dump", "the name of the folder"),
        ("license: Apache-2.0\n", "", "the license"),
        ("metadata:", "tags: one\nmetadata:", "only the fields of the format"),
        (f'"{__version__}"', "0.1", "metadata of strings"),
    ):
        assert fault in _faults("graph-dump", text.replace(old, new)), fault


@pytest.mark.fast
@pytest.mark.parametrize("skill", NAMES)
def test_options_of_commands_exist(skill: str) -> None:
    """A quick check in CI; the commands themselves run nightly."""
    found: Any = typer.main.get_command(app)
    for command in _commands(skill):
        words = shlex.split(re.sub(r"\$\(.*\)| [|>].*|^\(|\)$", "", command))
        if "inlay" not in words:
            continue
        name, *rest = words[words.index("inlay") + 1 :]
        options = {option for each in found.commands[name].params for option in each.opts}
        assert {word for word in rest if re.fullmatch(r"--?[a-z-]+", word)} <= options, command


@pytest.mark.fast
def test_the_plugin_is_valid() -> None:
    """Required fields and paths of a plugin and of a marketplace; `skills/` is where a plugin's skills are found."""
    plugin, market = (json.loads((ROOT / ".claude-plugin" / f"{name}.json").read_text()) for name in PLUGIN_FILES)
    assert re.fullmatch(KEBAB, plugin["name"])
    assert plugin["version"] == __version__
    assert plugin["author"]["name"]
    assert plugin["license"] == "Apache-2.0"
    assert all(isinstance(each, str) for each in (plugin["description"], *plugin["keywords"]))
    assert set(plugin) <= {"name", "version", "description", "author", "license", "keywords"}, "check the format"
    assert re.fullmatch(KEBAB, market["name"])
    assert market["owner"]["name"]
    (entry,) = market["plugins"]
    assert entry["name"] == plugin["name"]
    assert entry["source"].startswith("./"), "a path in this repository"
    root = ROOT / entry["source"]
    assert json.loads((root / ".claude-plugin" / "plugin.json").read_text()) == plugin
    assert sorted(each.parent.name for each in root.glob("skills/*/SKILL.md")) == NAMES


@pytest.mark.fast
def test_the_page_lists_every_skill() -> None:
    page = (ROOT / "docs" / "review.md").read_text()
    assert sorted(re.findall(r"^\| `skills/([\w-]+)` \|", page, re.MULTILINE)) == NAMES


@pytest.mark.nightly
def test_graph_dump(folder: Path) -> None:
    printed = _follow("graph-dump", folder, MODEL="mixer:mixer", PASS="fuse_gemms")
    assert (folder / "dumps" / "index.json").exists()
    assert "× 3" in printed, "three layers, folded"
    assert '"transform": "fuse_gemms"' in printed


@pytest.mark.nightly
def test_add_fusion(folder: Path) -> None:
    name = "conv1d_tanh_sigmoid_mul"
    printed = _follow("add-fusion", folder, MODEL="mixer:mixer", NAME=name, KERNEL="--kernel triton")
    assert f"inlay.{name}(" in printed
    review = (folder / "fusion" / "review" / "review.md").read_text()
    assert "- [ ]" not in review
    assert f"Candidate: fuse_{name}" in review
    assert "mixer:mixer: 3 sites" in review
    assert "Path: triton_fallback_path" in review


@pytest.mark.nightly
def test_exploration(folder: Path) -> None:
    model = llama_folder(folder / "model")
    printed = _follow("exploration", folder, MODEL=str(model))
    assert "match_rms_norm  matched 5" in printed
    assert "missing node" in printed, "the first norm follows no addition"
    assert "Candidate: rope_attention" in printed
    found = folder / "explored"
    assert sorted(each.name for each in found.iterdir()) == [
        *("candidates.json", "explain.json", "matches.lock", "program.py", "report.html")
    ]
    matches = {each["transform"]: each["matches"] for each in json.loads((found / "explain.json").read_text())}
    assert matches["match_attention"] == 2
    assert "match_attention:\n      sites: 2" in (found / "matches.lock").read_text()
    assert json.loads((found / "candidates.json").read_text())


@pytest.mark.nightly
def test_kernel_writing(folder: Path) -> None:
    pytest.importorskip("triton")
    name = "conv1d_tanh_sigmoid_mul"
    printed = _follow("kernel-writing", folder, MODEL="mixer:mixer", NAME=name)
    assert "needs_triton_fallback" in printed
    assert f"inlay.{name}(" in printed
    assert "skipped" not in printed
    assert len(re.findall(r"^\d+ passed", printed, re.MULTILINE)) == 3, "transform, numbers, compilation"
    review = (folder / "kernel" / "review" / "review.md").read_text()
    assert "- [ ]" not in review
    kernel = folder / "kernel" / f"{name}_triton.py"
    kernel.write_text(kernel.read_text().replace("tl.sigmoid(t", "tl.exp(t"))
    (numbers,) = [each for each in _commands("kernel-writing") if each.endswith("numbers")]
    with pytest.raises(AssertionError, match="not close"):
        _run(numbers, folder, {"NAME": name})


@pytest.mark.nightly
def test_contribution(tmp_path: Path) -> None:
    """In a copy of the repository: a test that no stage names is refused, and committed after it is named."""
    folder = tmp_path / "inlay"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".*_cache", "__pycache__", "site"))
    new = folder / "tests" / "test_contributed.py"
    variables = {
        "PYTHONPATH": os.pathsep.join(str(folder / each) for each in ("src", ".", "tests")),
        "TESTS": "tests/test_contributed.py",
        "MESSAGE": "tests: the sum of nothing is zero",
        **{f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    _run("git init -q && git add --all && git commit -qm start", folder, variables)
    new.write_text('"""A contribution."""\n\n\ndef test_sum() -> None:\n    assert sum([]) == 0\n')
    with pytest.raises(AssertionError, match=r"test_stages_page\.py.*add these to the stage they are about"):
        _follow("contribution", folder, **variables)
    stages = folder / "docs" / "stages.md"
    stages.write_text(
        stages.read_text().replace("`tests/test_adapters.py`", "`tests/test_adapters.py`, `tests/test_contributed.py`")
    )
    printed = _follow("contribution", folder, **variables)
    assert "tests: the sum of nothing is zero" in printed
    assert "Signed-off-by: a@b.example" in printed
    assert "tests/test_contributed.py" in printed
