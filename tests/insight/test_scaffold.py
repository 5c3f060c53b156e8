"""From a candidate to a tested transform: every command of docs/candidate_to_transform.md, and the odd cases."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.insight.candidates import find_candidates
from inlay.insight.scaffold import write_scaffold
from inlay.testing import assert_rewrites, assert_untouched, program_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "candidate_to_transform.md"


@pytest.mark.nightly
def test_every_command_of_the_page(tmp_path: Path) -> None:
    """The commands run in an empty folder with the example in it, and print what the page says they print."""
    shutil.copy(ROOT / "examples" / "mixer.py", tmp_path)
    blocks = re.findall(r"```(bash|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    commands = [text.strip() for kind, text in blocks if kind == "bash"]
    assert len(commands) == 4
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = ""
    for command in commands:
        environment = {**os.environ, "PATH": scripts, "COLUMNS": "120"}
        run = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, f"{command}: {run.stdout}{run.stderr}"
        printed += run.stdout
    for text in (text for kind, text in blocks if kind == "text"):
        for line in text.strip().splitlines():
            assert line.strip() in printed, line


def _two_linears(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    linear = torch.nn.functional.linear
    for _ in range(2):
        x = linear(x, v).exp() @ linear(x, w)
    return x


def _norm_then_scale(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = (torch.softmax(x / 7, -1) * y + 1) @ x
    return x


@pytest.mark.fast
@pytest.mark.parametrize(("function", "count"), [(_two_linears, 3), (_norm_then_scale, 2)])
def test_scaffolds_of_several_sorts(function: Any, count: int, tmp_path: Path) -> None:
    """Chains and epilogues: what is written fires and leaves alone what it says, at once."""
    args = [torch.randn(6, 6)] * count
    search = find_candidates(program_of(function, [each.clone() for each in args]))
    assert search.candidates
    for candidate in search.candidates:
        path = write_scaffold(search, candidate.name, tmp_path)[0]
        assert "enabled: false" in path.with_suffix(".yaml").read_text()
        rule = next(value for name, value in runpy.run_path(str(path)).items() if name.startswith("Fuse"))
        for case in rule.positive_cases():
            assert_rewrites(case.function, rule.name, args=case.args, axes=case.axes, sites=1)
        for case in rule.negative_cases():
            assert_untouched(case.function, rule.name, args=case.args, axes=case.axes)
        assert rule().apply(program_of(function, args).copy()).sites == len(candidate.regions)


@pytest.mark.fast
def test_refusals(tmp_path: Path) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = (torch.nn.functional.silu(x) * y) @ (torch.tanh(x / 3) * 3)
        return x

    search = find_candidates(program_of(model, [torch.randn(6, 6)] * 2))
    with pytest.raises(UsageError, match=r"There is no candidate div_tanh_mull\. Did you mean div_tanh_mul"):
        write_scaffold(search, "div_tanh_mull", tmp_path)
    with pytest.raises(UsageError, match="match_swiglu already does this"):
        write_scaffold(search, "swiglu", tmp_path)
    with pytest.raises(UsageError, match=r"does not need a new kernel: generated pointwise.*--force-kernel"):
        write_scaffold(search, "div_tanh_mul", tmp_path, kernel="triton")
    assert not list(tmp_path.iterdir()), "nothing is written when something is wrong"
    forced = write_scaffold(search, "div_tanh_mul", tmp_path / "forced", kernel="triton", force_kernel=True)
    assert "div_tanh_mul_triton.py" in {path.name for path in forced}
    write_scaffold(search, "div_tanh_mul", tmp_path)
    with pytest.raises(UsageError, match="already exists"):
        write_scaffold(search, "div_tanh_mul", tmp_path)
