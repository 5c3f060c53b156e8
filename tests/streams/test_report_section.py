"""The section of a report that shows how lanes ran: its facts, the option that adds it, and the page in a browser."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from inlay.cli.main import app
from inlay.streams.timeline_svg import section
from tests.chromium import Browser, installed
from tests.streams.test_timeline import KNOWN

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lanes")
    (folder / "timeline.json").write_text(KNOWN.to_json())
    made = folder / "report.html"
    options = ["--timeline", str(folder / "timeline.json"), "-o", str(made)]
    done = CliRunner().invoke(app, ["report", "models:convolutions", *options])
    assert done.exit_code == 0, done.output
    return made


def test_facts_of_a_run() -> None:
    found = section(KNOWN)
    assert ["lost waiting", "5.000 s"] in found["figures"]
    assert ["on the critical path", "8.000 s in 3 of 4 tasks"] in found["figures"]
    assert [row[0] for row in found["rows"]] == ["a", "b", "c", "d"]
    assert found["rows"][2] == ["c", 1, "3.000 s", "3.000 s", "1.000 s", True]
    assert found["picture"].startswith("<svg")


def test_the_page_has_them(page: Path) -> None:
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["lanes"] == section(KNOWN)


def test_a_file_that_is_no_timeline_is_said(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    for file, says in (
        (tmp_path / "no.json", "The JSON is not a valid timeline"),
        (tmp_path / "none.json", "cannot be read"),
    ):
        done = CliRunner().invoke(app, ["report", "models:convolutions", "--timeline", str(file)])
        assert done.exit_code in (2, 8)
        assert says in done.output


def test_it_is_drawn(page: Path, tmp_path: Path) -> None:
    if installed() is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is not installed; .ci/run installs it where it may")
        pytest.skip("Pages are looked at with Chromium: apt-get install chromium")
    with Browser(tmp_path / "chromium") as browser:
        for width in (1280, 390):
            browser.open(page, width=width, dark=width == 390)
            browser.ask("document.getElementById('lanes').scrollIntoView({behavior: 'instant'})")
            assert browser.complaints == []
            assert browser.ask("document.querySelector('#lanes img').naturalWidth") == 960
            assert browser.ask("document.documentElement.scrollWidth") <= width, "only boxes scroll sideways"
            assert browser.ask("document.querySelectorAll('#lanes tbody tr').length") == 4
            browser.picture(page.with_name(f"lanes-{width}.png"))
