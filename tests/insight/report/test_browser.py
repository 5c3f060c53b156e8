"""Pages in a browser: they open quickly, say nothing on the console, ask for nothing, and keys reach all of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from inlay.cli.main import app
from inlay.errors import ExitCode
from inlay.insight.watch import watch_patterns
from inlay.watch_startup import SUFFIX
from tests.chromium import Browser, installed

if TYPE_CHECKING:
    from collections.abc import Iterator

PICTURES = os.environ.get("INLAY_PICTURES_DIR")
"""A folder to keep the pictures in, for looking at them."""
OPENED_WITHIN = 2000
"""Milliseconds."""
FOCUSED = """(() => {
    const at = document.activeElement;
    if (!at || at === document.body) return '';
    at.dataset.number ||= String(document.seen = (document.seen || 0) + 1);
    return at.dataset.number;
})()"""
"""The number of what has the focus, in the order in which things had it."""
MISSED = """[...document.querySelectorAll("a[href], button, input, summary, [tabindex='0']")]
    .filter((each) => each.checkVisibility() && !each.dataset.number).map((each) => each.outerHTML.slice(0, 120))"""
SHOWN = """[...document.querySelectorAll('.timeline button')].filter((each) => !each.hidden)
    .map((each) => each.querySelector('.name').textContent)"""
"""The transforms that a search leaves."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if installed() is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is not installed; .ci/run installs it where it may")
        pytest.skip("Pages are looked at with Chromium: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = Path(PICTURES) if PICTURES else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _assert_quiet(browser: Browser, page: Path) -> None:
    assert browser.complaints == []
    asked = [address for address in browser.requests if not address.startswith(("about:", "data:"))]
    assert {address.partition("#")[0] for address in asked} == {page.as_uri()}
    assert int(browser.ask("document.documentElement.dataset.ready")) < OPENED_WITHIN


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["wide-light", "narrow-dark"])
def test_it_opens(browser: Browser, smollm2_report: Path, pictures: Path, width: int, dark: bool) -> None:
    browser.open(smollm2_report, width=width, dark=dark, fragment="#transform=match_rms_norm")
    _assert_quiet(browser, smollm2_report)
    assert browser.ask("document.documentElement.scrollWidth") <= width, "only boxes scroll sideways"
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    taken = browser.picture(pictures / f"smollm2-{width}-{'dark' if dark else 'light'}.png")
    assert taken.stat().st_size > 10_000, "an empty page compresses better"
    for part in ("detail", "bindings", "plan"):
        browser.ask(f"document.getElementById('{part}').scrollIntoView({{behavior: 'instant'}})")
        browser.picture(pictures / f"smollm2-{width}-{'dark' if dark else 'light'}-{part}.png")


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1280, 390])
def test_a_hundred_layers(browser: Browser, hundred_layers_report: Path, pictures: Path, width: int) -> None:
    browser.open(hundred_layers_report, width=width, dark=width == 390)
    _assert_quiet(browser, hundred_layers_report)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask("document.querySelectorAll('*').length") < 6000, "a hundred layers are drawn as one"
    browser.picture(pictures / f"hundred-{width}.png")


def test_tab_reaches_everything(browser: Browser, smollm2_report: Path) -> None:
    browser.open(smollm2_report)
    browser.press("Tab", 9)
    last, now = "", browser.ask(FOCUSED)
    while now not in ("", "1") or not last:
        assert now != last, f"Tab stays at {now}"
        assert int(now) < 400, "Tab goes on for ever"
        browser.press("Tab", 9)
        last, now = now, browser.ask(FOCUSED)
    assert int(last) > 40
    assert browser.ask(MISSED) == []


def test_keys(browser: Browser, smollm2_report: Path) -> None:
    browser.open(smollm2_report, fragment="#transform=clean_noops")
    current = "document.querySelector('.timeline [aria-current] .name').textContent"
    assert browser.ask(current) == "clean_noops"
    browser.press("j", 74)
    assert browser.ask(current) == "fold_length_comparisons"
    browser.press("k", 75)
    assert browser.ask(current) == "clean_noops"
    browser.ask("document.querySelector('.timeline button').focus()")
    browser.press("ArrowDown", 40)
    browser.press("ArrowDown", 40)
    assert browser.ask(current) == "match_layer_norm"
    assert browser.ask("document.activeElement.querySelector('.name').textContent") == "match_layer_norm"
    browser.press("/", 191)
    assert browser.ask("document.activeElement.id") == "search"
    assert browser.ask("document.activeElement.value") == ""
    browser.press("Escape", 27)
    browser.press("?", 191)
    assert browser.ask("document.getElementById('help').open")
    browser.press("Escape", 27)
    browser.press("t", 84)
    browser.press("t", 84)
    assert browser.ask("document.documentElement.dataset.theme") == "dark"
    assert browser.ask("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    browser.press("t", 84)
    assert browser.complaints == []


def test_search_filters(browser: Browser, smollm2_report: Path) -> None:
    browser.open(smollm2_report, fragment="#find=kv_cache")
    assert "insert_kv_cache" in browser.ask(SHOWN)
    assert "match_layer_norm" not in browser.ask(SHOWN)
    storages = "[...document.querySelectorAll('.storage')].filter((each) => !each.hidden).length"
    assert browser.ask(storages) == 2
    assert "kv_cache" in browser.ask("document.getElementById('found').textContent")
    browser.open(smollm2_report, fragment="#find=no-such-thing")
    assert browser.ask(SHOWN) == []
    assert browser.ask("document.getElementById('found').textContent") == "No matches for “no-such-thing”."


def test_gaps_open(browser: Browser, smollm2_report: Path) -> None:
    browser.open(smollm2_report, fragment="#transform=match_rms_norm")
    rows = "document.querySelectorAll('#detail .row').length"
    before = browser.ask(rows)
    browser.ask("document.querySelector('#detail .gap').click()")
    opened = browser.ask(rows)
    assert opened > before
    browser.ask("document.querySelector('#detail [aria-pressed]').click()")
    assert browser.ask(rows) > opened
    assert browser.ask("document.querySelectorAll('#detail .gap').length") == 0
    assert browser.ask("document.activeElement.textContent") == "Whole program"


@pytest.mark.parametrize("width", [1280, 390])
def test_two_programs(browser: Browser, two_programs_page: Path, pictures: Path, width: int) -> None:
    browser.open(two_programs_page, width=width)
    _assert_quiet(browser, two_programs_page)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask("document.querySelectorAll('.row.changed, .row.added').length") > 0
    browser.picture(pictures / f"diff-{width}.png")


def _watch(folder: Path, second: float) -> None:
    """Write what is watched of a pass with two sites; only with 2 the second one matches."""

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.exp() * 2 + w).sin().exp() * second + w

    with FakeTensorMode():
        inputs = [torch.empty(3), torch.empty(3)]
        passes = PatternMatcherPass(pass_name="<doubles>")
        register_replacement(lambda x, w: x.exp() * 2 + w, lambda x, w: x - w, inputs, fwd_only, [passes])
        with watch_patterns() as records:
            passes.apply(fwd_only(model, inputs))
    folder.mkdir(exist_ok=True)
    (folder / f"1{SUFFIX}").write_text("".join(json.dumps(each.to_json()) + "\n" for each in records))


def test_watched_passes(browser: Browser, tmp_path: Path, pictures: Path) -> None:
    folder, lock, page = tmp_path / "watched", tmp_path / "passes.lock", tmp_path / "page.html"
    _watch(folder, 2)
    assert CliRunner().invoke(app, ["lock", str(folder), "-o", str(lock)]).exit_code == 0
    _watch(folder, 3)
    made = CliRunner().invoke(app, ["report", str(folder), "--lock", str(lock), "-o", str(page)])
    assert made.exit_code == 0, made.output
    browser.open(page, width=390)
    _assert_quiet(browser, page)
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    cells = (
        "[...document.querySelectorAll('#{} tbody tr')].map((row) => [...row.children].map((each) => each.innerText))"
    )
    ((name, patterns, matches, missed, *_),) = browser.ask(cells.format("passes"))
    assert (name, patterns, matches, missed) == ("<doubles>", "1", "1", "1")
    ((_, sites, node, reason, share, *_),) = browser.ask(cells.format("misses"))
    assert (sites, node, share) == ("1", "mul_1", "3 of 3")
    assert "other of mul_1 is 3; expected 2" in reason
    rows = browser.ask(cells.format("table-0"))
    assert ["<doubles>", "2 sites", "1 sites; missed: constant differs × 1"] in rows
    browser.picture(pictures / "watched.png")
    refused = CliRunner().invoke(app, ["report", str(tmp_path), "--lock", str(lock), "-o", str(page)])
    assert refused.exit_code == ExitCode.USAGE
