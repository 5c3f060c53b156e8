"""Reports: what a page says is what happened, small however deep the model, and nothing of a model is markup."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from inlay import Example
from inlay.cli.main import app
from inlay.flow import BuildOptions
from inlay.frontend import capture
from inlay.insight.report import report_package, report_program, write_page
from inlay.insight.report.page import render_page
from tests.models import config_folder, llama_folder

if TYPE_CHECKING:
    from pathlib import Path

MOST = 3_000_000
"""Bytes of a page."""


def norms() -> Example:
    """A norm that matches, and one that does not: its variance is returned."""

    class Norms(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> Any:
            one = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
            scale = torch.rsqrt(one.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * (one * scale), scale

    return Example(Norms(), (torch.randn(3, 8),), axes={"x": {0: "batch"}})


def _facts(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    facts: dict[str, Any] = json.loads(found[1])
    return facts


def _transform(facts: dict[str, Any], key: str) -> dict[str, Any]:
    return next(each for each in facts["transforms"] if each["key"] == key)


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small module, made by the command."""
    page = tmp_path_factory.mktemp("report") / "report.html"
    done = _run("report", "tests.insight.report.test_report:norms", "-o", str(page), "--drift")
    assert done.exit_code == 0, done.output
    assert f"wrote {page}" in done.stderr.replace("\n", "")
    return page


def test_what_matched_and_what_did_not(small: Path) -> None:
    norm = _transform(_facts(small), "match_rms_norm")
    assert (norm["sites"], norm["status"], norm["numerics"]) == (1, "ran", "exact")
    assert [place["count"] for place in norm["places"]] == [1]
    assert norm["misses"][0]["reason"].startswith("another consumer")
    assert norm["misses"][0]["suggestion"]


def test_before_and_after_stand_side_by_side(small: Path) -> None:
    facts = _facts(small)
    found = _transform(facts, "match_rms_norm")["diff"]
    rows = list(zip(*[iter(found["rows"])] * 3, strict=True))
    after = [facts["lines"][right] for kind, _, right in rows if kind in (1, 3)]
    assert any("inlay.rms_norm" in line for line in after)
    assert found["operators"]["inlay.rms_norm.default"] == 1
    assert len(facts["lines"]) == len(set(facts["lines"])), "each line is kept once"


def test_drift_is_measured_when_asked_for(small: Path) -> None:
    (row,) = [row for row in _facts(small)["drift"]["rows"] if row["transform"] == "match_rms_norm"]
    assert row["change"] in ("none", "rounding, nearer", "rounding, farther")
    plain = report_program(capture(norms()))
    assert plain["drift"]["rows"] == []
    assert "inlay verify" in plain["drift"]["why"]


def test_settings_say_where_they_come_from() -> None:
    facts = report_program(capture(norms()), BuildOptions(settings=("match_rope.enabled=false",)))
    assert ["match_rope", "enabled", "False", "--set match_rope.enabled=false"] in facts["configuration"]["rows"]
    assert _transform(facts, "match_rope")["status"] == "disabled"


def misses() -> Example:
    """A norm that nearly matches, one of two nodes of a gate, and a gate that matches."""

    class Misses(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            silu = torch.nn.functional.silu
            normed = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            scaled = x * normed
            gate = silu(x) * normed
            return scaled, torch.nn.functional.gelu(x) + 1, gate

    return Example(Misses(), (torch.randn(3, 8),))


def chains() -> Example:
    """Two equal chains of operators."""

    class Chains(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.tanh(torch.tanh(x / 30) * 30 @ x / 30) * 30 @ x

    return Example(Chains(), (torch.randn(4, 4),))


def test_trivial_misses_stand_apart() -> None:
    facts = report_program(capture(misses()))
    assert [each["trivial"] for each in _transform(facts, "match_geglu")["misses"]] == [True]
    assert [each["trivial"] for each in _transform(facts, "match_rms_norm")["misses"]] == [False]
    skipped = _transform(facts, "match_rms_norm")
    assert (skipped["status"], skipped["skip_reason"]) == (
        "skipped",
        "the program has no aten.rms_norm.default or aten.rsqrt.default",
    )


def test_explain_puts_what_nearly_matched_on_top() -> None:
    command = ["explain", "tests.insight.report.test_report:misses"]
    lines = _run(*command).stdout.splitlines()
    assert lines[0] == "1 near miss; 1 trivial ones hidden, --all shows them."
    assert lines[1] == "match_rms_norm  matched nothing"
    assert "aten.rsqrt.default expected, aten.sqrt.default found" in lines[2]
    text = "\n".join(lines)
    assert text.index("match_rms_norm") < text.index("match_swiglu  matched 1")
    assert "match_geglu  " not in text
    assert "Skipped: match_layer_norm (the program has no " in text
    shown = _run(*command, "--all").stdout
    assert "1 near miss; 1 trivial ones shown." in shown
    assert "match_geglu  matched nothing" in shown


def test_a_report_and_the_candidates_agree_about_a_module() -> None:
    told = report_program(capture(chains()))["candidates"]
    found = json.loads(_run("candidates", "tests.insight.report.test_report:chains", "--as-built", "--json").stdout)
    assert len(told["rows"]) == 1
    assert (told["rows"], told["searched"]) == (found["candidates"], found["searched"])
    assert found["searched"] == "the program after the transforms, without a KV cache"
    text = _run("candidates", "tests.insight.report.test_report:chains", "--no-transforms").stdout
    assert text.startswith("Searched: the program as captured.")
    assert "\n1 candidate; together at most" in text


@pytest.mark.nightly
def test_a_report_and_the_candidates_agree(tmp_path: Path) -> None:
    """About the program of a build, with its cache; without it, both say so and the program is another one."""
    folder = str(config_folder(tmp_path / "model"))
    told = report_program(capture(folder))["candidates"]
    built, plain, captured = (
        json.loads(_run("candidates", folder, "--json", *options).stdout)
        for options in (["--as-built"], [], ["--no-transforms"])
    )
    assert told["searched"] == built["searched"] == "the program after the transforms, with a KV cache"
    assert told["rows"] == built["candidates"]
    assert plain["searched"] == "the program after the transforms, without a KV cache"
    assert captured["searched"] == "the program as captured"
    assert len({len(each["candidates"]) for each in (built, plain, captured)}) > 1
    assert _run("candidates", folder, "--as-built", "--no-transforms").exit_code == 2


def test_a_broken_contract_is_shown() -> None:
    facts = report_program(capture(norms()), BuildOptions(settings=("match_rms_norm.expect=2",)))
    assert "matched 1 sites, expected 2" in _transform(facts, "match_rms_norm")["contract"]["broken"]


def test_nothing_of_a_model_is_markup() -> None:
    facts = report_program(capture(norms()))
    nasty = "</script><script>alert(1)</script><!-- %%DATA%% \u2028"
    text = render_page(facts | {"title": nasty, "lines": [nasty]})
    assert "<script>alert" not in text
    assert text.count("<script") == 2
    found = re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["title"] == nasty


def test_a_page_asks_nobody(small: Path) -> None:
    text = small.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(|fetch\(|XMLHttpRequest""", text)


def test_other_files_are_left_alone(tmp_path: Path, small: Path) -> None:
    file = tmp_path / "notes.html"
    file.write_text("my notes")
    refused = _run("report", "tests.insight.report.test_report:norms", "-o", str(file))
    assert refused.exit_code == 2
    assert "was not written by Inlay" in refused.stderr.replace("\n", " ")
    assert file.read_text() == "my notes"
    write_page(_facts(small), tmp_path / "page.html")
    write_page(_facts(small), tmp_path / "page.html")


def test_a_decoder(smollm2_report: Path) -> None:
    facts = _facts(smollm2_report)
    assert smollm2_report.stat().st_size <= MOST
    states = [row for row in facts["bindings"] if row["kind"] == "state"]
    assert [(row["name"], row["count"], row["why"]) for row in states] == [
        ("keys.*", 30, "kv_cache_update"),
        ("values.*", 30, "kv_cache_update"),
    ]
    assert states[0]["members"][0] == ["keys.0", "keys_0.out"]
    assert [bucket["order"] for bucket in facts["plan"]["buckets"]] == [
        [["part0", 1], ["block1", 30], ["part2", 1]]
    ] * 2
    assert {row["piece"] for row in facts["memory"]["activations"]} == {"part0", "block1", "part2"}
    assert facts["memory"]["state"] == sum(row["bytes"] for row in states)
    (place, *_) = _transform(facts, "match_swiglu")["places"]
    assert (place["count"], place["layers"]) == (30, "layers 0–29")
    assert _transform(facts, "match_rms_norm")["contract"]["wanted"] == 61


@pytest.mark.nightly
def test_a_hundred_layers(hundred_layers_report: Path) -> None:
    assert hundred_layers_report.stat().st_size <= MOST
    facts = _facts(hundred_layers_report)
    assert _transform(facts, "match_rms_norm")["sites"] == 201
    assert len(facts["lines"]) < 2000, "layers are folded"


@pytest.mark.nightly
def test_a_package(tmp_path: Path) -> None:
    from inlay.flow import build

    folder = str(llama_folder(tmp_path / "model"))
    one, two = tmp_path / "one", tmp_path / "two"
    build(folder, one, BuildOptions(max_length=32, buckets=()))
    build(folder, two, BuildOptions(max_length=64, buckets=(), weights="int8"))
    page = tmp_path / "package.html"
    assert _run("report", str(one), "-o", str(page)).exit_code == 0
    facts = _facts(page)
    assert facts == report_package(one)
    assert facts["plan"]["buckets"][0]["pieces"][0]["size"] > 0
    assert _transform(facts, "match_rms_norm")["sites"] == 5
    for part in ("candidates", "drift", "memory", "configuration"):
        assert facts[part]["why"], f"{part} says why it is empty"
    _compare_packages(one, two, tmp_path)


def _compare_packages(one: Path, two: Path, tmp_path: Path) -> None:
    page = tmp_path / "diff.html"
    differ = _run("diff", str(one), str(two), "-o", str(page))
    assert differ.exit_code == 1, differ.output
    tables = {each["title"]: {row[0]: row[1:] for row in each["rows"]} for each in _facts(page)["tables"]}
    assert tables["Configuration"]["insert_kv_cache.max_length"] == ["32", "64"]
    assert any(row["kernels"] for row in report_package(two)["plan"]["buckets"][0]["pieces"])
    assert "pack_weights" in _run("diff", str(one), str(two)).stdout
    assert _run("diff", str(one), str(one)).exit_code == 0
    mixed = _run("diff", str(one), str(one / "current" / "matches.lock"))
    assert mixed.exit_code == 2
    shutil.copy(one / "current" / "matches.lock", tmp_path / "a.lock")
    shutil.copy(two / "current" / "matches.lock", tmp_path / "b.lock")
    found = json.loads(_run("diff", str(tmp_path / "a.lock"), str(tmp_path / "b.lock"), "--json").stdout)
    assert {row["name"] for row in found["rows"]} == {"configuration"}, "both pack as many, in other formats"


def test_two_programs(tmp_path: Path) -> None:
    for layers in (2, 3):
        folder = config_folder(tmp_path / f"model{layers}", num_hidden_layers=layers)
        assert _run("show", str(folder), "--full", "-o", str(tmp_path / f"{layers}.py")).exit_code == 0
    page = tmp_path / "diff.html"
    assert _run("diff", str(tmp_path / "2.py"), str(tmp_path / "3.py"), "-o", str(page)).exit_code == 1
    facts = _facts(page)
    assert not facts["equal"]
    assert facts["diff"]["operators"]["aten.linear.default"] == 7


TRACED = """
import torch
from inlay.frontend import capture
from inlay.flow import BuildOptions, prepare, transform
from tests.insight.report.test_report import norms
transform(prepare(capture(norms()), BuildOptions()), BuildOptions())
with torch.no_grad():
    torch.compile(norms().module, backend="inlay")(torch.randn(3, 8))
"""


def test_programs_are_part_of_the_trace(tmp_path: Path) -> None:
    """What tlparse reads: an artifact for each program; without TORCH_TRACE nothing."""
    environment = os.environ | {"TORCH_TRACE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", TRACED], env=environment, check=True, timeout=300)
    text = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    names = re.findall(r'"name": "(inlay_[^"]+)", "encoding": "string"', text)
    assert names[:2] == ["inlay_000_capture_program", "inlay_001_canonicalize_match_rms_norm"]
    assert len(names) == 4, "once for the flow, once for torch.compile"
    assert "# match_rms_norm: [SUMMARY] matches=1" in text
    assert "inlay.rms_norm(" in text


def test_no_trace_unless_asked_for() -> None:
    from inlay.transforms.structured_trace import trace_instruments

    assert "TORCH_TRACE" in os.environ or trace_instruments() == []
