"""The header that stands before <regex> while wrappers are compiled: same answers, and only there."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from inlay.lowering import aoti

if TYPE_CHECKING:
    from pathlib import Path

PATTERN = "(cpu|cuda|xpu|mps)(:([0-9]+))?"
SOURCE = """
#include <regex>
#include <cstdio>
#include <string>
int main(int count, char** texts) {
    for (int at = 1; at < count; at++) {
        std::regex re("PATTERN");
        std::smatch sm;
        const std::string text = texts[at];
        const bool matched = std::regex_match(text, sm, re);
        std::printf("%d", matched);
        for (int part = 0; matched && part < 4; part++)
            std::printf(" %d<%s>", bool(sm[part].matched), sm[part].str().c_str());
        std::printf("\\n");
    }
}
"""
DEVICES = (
    "cpu",
    "cuda",
    "cuda:0",
    "cuda:17",
    "mps:1",
    "xpu",
    "cpu:",
    "cpu:x",
    "cpu:1x",
    "",
    ":",
    ":1",
    "cp",
    "cpu:1:2",
    "CPU",
    "cpuu",
    " cpu",
    "cuda:-1",
    "cpu: 1",
)


def _compile(folder: Path, pattern: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "use.cpp").write_text(SOURCE.replace("PATTERN", pattern))
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None
    command = [compiler, "-std=c++20", "-O0", *flags, str(folder / "use.cpp"), "-o", str(folder / "use")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _answers(folder: Path, pattern: str, *flags: str, texts: tuple[str, ...] = DEVICES) -> str:
    done = _compile(folder, pattern, *flags)
    assert done.returncode == 0, done.stderr
    return subprocess.run([folder / "use", *texts], capture_output=True, text=True, check=True).stdout


def test_same_answers(tmp_path: Path) -> None:
    own = _answers(tmp_path, PATTERN, "-DTORCH_INDUCTOR_CPP_WRAPPER", f"-I{aoti._HEADERS}")
    assert own == _answers(tmp_path, PATTERN)
    assert (own[0], own.count("\n1")) == ("1", 5)


def test_other_expressions(tmp_path: Path) -> None:
    """Refused in a wrapper, the standard library's anywhere else."""
    done = _compile(tmp_path, "(c|d)(x)(y)", "-DTORCH_INDUCTOR_CPP_WRAPPER", f"-I{aoti._HEADERS}")
    assert done.returncode != 0
    assert "inlay/lowering/headers/regex does not support this expression" in done.stderr
    assert _answers(tmp_path, "(c|d)(x)(y)", f"-I{aoti._HEADERS}", texts=("dxy", "d")) == "1 1<dxy> 1<d> 1<x> 1<y>\n0\n"


@pytest.mark.parametrize("before", [None, "/elsewhere"])
def test_the_environment_is_given_back(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPLUS_INCLUDE_PATH", raising=False)
    if before is not None:
        monkeypatch.setenv("CPLUS_INCLUDE_PATH", before)
    with aoti._lean_headers():
        found = os.environ["CPLUS_INCLUDE_PATH"].split(os.pathsep)
    assert found == [str(aoti._HEADERS), *([before] if before else [])], "torch uses <regex> in another way now"
    assert os.environ.get("CPLUS_INCLUDE_PATH") == before
