"""The examples do what they say."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map
from typer.testing import CliRunner

from inlay.cli.main import app

EXAMPLES = Path(__file__).parents[2] / "examples"
FIRES = (
    *("clean_noops", "match_layer_norm", "match_rms_norm", "match_softmax_attention", "match_attention"),
    *("match_rope_interleaved", "match_rope", "match_swiglu", "match_geglu", "fuse_add_rms_norm"),
)
"""What the decoder of the example was written to show."""
CLAIMS = {
    "aliased_io_user_inputs": (
        "cache.out      output  f32[1, 4, 1024, 64]    cache (kv_cache_update)",
        "state.out      output  f32[1, 4, 1024, 64]    state (declared)",
        "new_state      output  f32[1, 4, 1024, 64]    state (also returned)",
        "a step writes 16,384 of the 1,048,576 bytes of cache and copies 0",
        "a step writes 1,048,576 of the 1,048,576 bytes of state and copies 0",
        "largest (f32[]) cannot live in state (f32[1, 4, 1024, 64]): the shapes differ.",
        "yes  it is rejected",
        "yes  8 steps equal eager PyTorch, cache included",
    ),
    "aliased_io_buffers": (
        "b_cache        buffer  f32[1, 4, 1024, 64]",
        "b_cache        input   f32[1, 4, 1024, 64]",
        "filled.out     output  i64[1]                 b_filled (kv_cache_update)",
        "a step writes 16,384 of the 1,048,576 bytes of cache and copies 0",
        "yes  one program serves two independent states",
        "yes  a second program continues, equal to the bit",
        "yes  a reset restores the values of the module",
        "buffers: cache f32[1, 4, 1024, 64], filled i64[1]",
        "yes  8 steps of the loaded module equal eager PyTorch",
    ),
    "aliased_io_kv_attention": (
        "k_cache.out    output  f32[2, 4, 1024, 64]    k_cache (kv_cache_update)",
        "a step writes 32,768 of the 2,097,152 bytes of k_cache and copies 0",
        "a step writes 32,768 of the 2,097,152 bytes of v_cache and copies 0",
        "yes  2 of 2 states are updated in place",
        "yes  32 steps equal eager attention over 32 tokens at once, within ",
    ),
    "aliased_io_streaming_conv": (
        "a step writes 245,760 of the 245,760 bytes of state and copies ",
        "a step writes 4,096 of the 249,856 bytes of state and copies 0",
        "yes  150 chunks equal eager convolution of the whole input, within ",
        "yes  only the new frames are written",
    ),
}
"""What the examples of state in place print."""
BROKEN = {
    "aliased_io_user_inputs": "NO   nothing as large as the cache is copied",
    "aliased_io_buffers": "NO   nothing as large as the cache is copied",
    "aliased_io_kv_attention": "NO   only the pages of the new rows are written",
    "aliased_io_streaming_conv": "NO   there is no second state; only the input of conv1d is copied",
}
"""What they print when somebody copies after all."""
PASSES = [each["name"] for each in json.loads(CliRunner().invoke(app, ["passes", "--json"]).stdout)]


def load(name: str) -> Any:
    """An example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def example() -> Any:
    """The example, which captures each model only once here."""
    module = load("run_pass_before_after")
    whole, make = module.capture, module.decoder
    module.decoder = lambda: "the decoder"
    module.capture = cache(lambda model: whole(make() if model == "the decoder" else model))
    return module


def test_every_pass_of_the_list_is_meant() -> None:
    assert set(FIRES) <= set(PASSES)


@pytest.mark.fast
def test_a_pass_that_is_refused(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The decoder computes its angles from a column of positions, the same for all sequences."""
    assert example.main(["--pass", "insert_kv_cache"]) == 7
    assert "it reads positions as if they were equal in all sequences" in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize("name", [each for each in PASSES if each != "insert_kv_cache"])
def test_before_and_after(example: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--pass", name]) == 0
    text = capsys.readouterr().out
    assert f"{name}: [SUMMARY] " in text
    assert len(text.splitlines()) <= 61, "a screen, and the summary"
    if name in FIRES:
        assert "[SUMMARY] matches=" in text
        assert "[SUMMARY] matches=0" not in text
        assert any(line.startswith(("~", "-", "+")) for line in text.splitlines())
    elif "[SUMMARY] matches=0" in text or "[SUMMARY] skipped (" in text:
        assert f"{name} changed nothing: " in text


@pytest.mark.fast
def test_full(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--pass", "match_swiglu", "--full"]) == 0
    before, after = capsys.readouterr().out.split("# ---- after match_swiglu")
    assert before.count("aten.silu.default(") == 2
    assert after.count("inlay.swiglu.default(") == 2
    assert "aten.silu.default(" not in after


@pytest.mark.fast
def test_an_alias(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--pass", "fuse_norm"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith("fuse_add_rms_norm: [SUMMARY] matches=4 ")
    assert "inlay.add_rms_norm(" in text


@pytest.mark.fast
def test_fix_functionalization(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """On the post-grad graph: two writes become in-place, and one stays a copy, with the reason."""
    assert example.main(["--pass", "fix_functionalization"]) == 0
    text = capsys.readouterr().out
    removed, added = (
        [line[1:].strip() for line in text.splitlines() if line.startswith(sign) and not line.startswith(sign * 3)]
        for sign in "-+"
    )
    assert sum("auto_functionalized_v2(torch.ops.example.write_row" in line for line in removed) == 3
    assert sum("aten.copy_.default(" in line for line in removed) == 2
    assert sum("torch.ops.example.write_row.default(arg" in line for line in added) == 2
    assert sum("aten.clone.default(" in line for line in added) == 1
    assert text.count("in place") == 2
    assert "writes a copy of arg3_1: its old value is read after the write (sub)" in text
    assert text.splitlines()[-1] == "fix_functionalization: [SUMMARY] matches=2 copied=1 copies_removed=2"
    assert example.main(["--pass", "fix_functionalization", "--full"]) == 0
    before, after = capsys.readouterr().out.split("# ---- after fix_functionalization")
    assert before.count("auto_functionalized_v2(") == 3
    assert "auto_functionalized" not in after
    assert example.main(["--pass", "fix_functionalization", "--model", "models:convolutions"]) == 2


@pytest.mark.fast
def test_the_step_of_the_example_computes_the_same(example: Any) -> None:
    """Compiled with the pass, results and caches are those of eager."""
    compiled = torch.compile(example.cache_step, options={"post_grad_custom_post_pass": example.RecordedFix()})
    want, got = example.cache_inputs(), example.cache_inputs()
    torch.testing.assert_close(compiled(*got), example.cache_step(*want))
    assert all(torch.equal(one, two) for one, two in zip(want, got, strict=True))
    assert not torch.equal(got[0], example.cache_inputs()[0])


@pytest.mark.fast
def test_nothing_to_do_is_said_kindly(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--pass", "match_swiglu", "--model", "models:convolutions"]) == 0
    text = capsys.readouterr().out
    assert "match_swiglu changed nothing: nothing in this program resembles its pattern." in text
    assert "[SUMMARY] skipped (the program has no aten.silu.default)" in text


@pytest.mark.fast
def test_mistakes_are_sentences(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--pass", "match_swigl"]) == 2
    assert "Did you mean match_swiglu?" in capsys.readouterr().err
    assert example.main(["--pass", "match_swiglu", "--model", "no/such folder"]) == 3
    assert "There is no file or folder" in capsys.readouterr().err


def test_as_a_person_runs_it() -> None:
    command = [sys.executable, str(EXAMPLES / "run_pass_before_after.py"), "--pass", "fuse_add_rms_norm"]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300, check=True)
    assert run.stdout.splitlines()[-1].startswith("fuse_add_rms_norm: [SUMMARY] matches=4 ")
    assert "inlay.add_rms_norm(" in run.stdout


def _assert_claims(name: str, text: str) -> None:
    for claim in CLAIMS[name]:
        assert claim in text
    assert "yes  " in text
    assert "NO " not in text
    said = "is not in place" in text
    assert said == (name == "aliased_io_streaming_conv"), "all frames move there, and that is said"


@pytest.mark.fast
@pytest.mark.parametrize("name", CLAIMS)
def test_in_place(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(name).main(["--backend", "eager"]) == 0
    _assert_claims(name, capsys.readouterr().out)


@pytest.mark.parametrize("name", ["aliased_io_kv_attention", "aliased_io_streaming_conv"])
def test_in_place_compiled(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(name).main([]) == 0
    _assert_claims(name, capsys.readouterr().out)


class Copies:
    """A compiled program that works on copies of what it is given, and copies the results back."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copied = tree_map(torch.clone, (args, kwargs))
        result = self.step(*copied[0], **copied[1])
        for there, here in zip(tree_leaves((args, kwargs)), tree_leaves(copied), strict=True):
            there.copy_(here)
        return result


@pytest.mark.fast
@pytest.mark.parametrize("name", CLAIMS)
def test_what_is_copied_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(name)
    whole = module.compile_program
    monkeypatch.setattr(module, "compile_program", lambda *args, **kwargs: Copies(whole(*args, **kwargs)))
    assert module.main(["--backend", "eager"]) == 1
    text = capsys.readouterr().out
    assert BROKEN[name] in text
    assert not any(line.startswith("NO") and "equal eager" in line for line in text.splitlines())


@pytest.mark.fast
def test_a_state_that_cannot_be_in_place_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def moved_within(self: Any, cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache[:, :, 512:] = cache[:, :, :512]
        cache[:, :, :1] = row
        return cache.mean(2)

    module = load("aliased_io_user_inputs")
    monkeypatch.setattr(module.Append, "forward", moved_within)
    assert module.main(["--backend", "eager"]) == 1
    text = capsys.readouterr().out
    assert "cache is not in place: overlap: copy_ reads " in text
    assert "; f32[1, 4, 1024, 64], 1,048,576 bytes, is copied at every call" in text
    assert "NO   0 of 1 states are updated in place" in text
    assert "yes  8 steps equal eager PyTorch, cache included" in text


@pytest.mark.fast
@pytest.mark.parametrize("name", CLAIMS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        load(name).main(["--help"])
    text = capsys.readouterr().out
    assert "--backend {eager,inductor,aot}" in text
    assert f"python examples/{name}.py" in text


@pytest.mark.fast
def test_every_example_is_listed() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    runnable = [file.name for file in EXAMPLES.glob("*.py") if "def main(" in file.read_text()]
    assert len(runnable) >= 6
    for name in runnable:
        assert f"python examples/{name}" in page
