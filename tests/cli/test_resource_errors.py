"""What a user reads when the machine has no more of what is needed, and where nobody looks at a terminal."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import inlay
from inlay.cli import console
from inlay.errors import MachineError, ProgramError

pytestmark = pytest.mark.fast


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines on standard error."""
    lines: list[str] = []
    monkeypatch.setattr(console.err, "print", lambda text, **_: lines.append(text))
    return lines


def _fail(error: BaseException) -> int:
    with pytest.raises(typer.Exit) as ended, console.error_boundary():
        raise error
    return int(ended.value.exit_code)


def _full() -> OSError:
    """What the system says when a disk is full."""
    try:
        Path("/dev/full").write_text("x")
    except OSError as error:
        return error
    pytest.skip("there is no /dev/full")


def test_a_full_disk(said: list[str]) -> None:
    assert _fail(_full()) == 9
    assert said == [
        "[bold red]error:[/] There is no space left for the output, here or in "
        f"{tempfile.gettempdir()}. Free some space, or write to another disk."
    ]


def test_an_interruption(said: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt), console.error_boundary():
        raise KeyboardInterrupt
    assert said == ["Interrupted. Unfinished output was discarded."]


def test_a_full_disk_below_another_error(said: list[str]) -> None:
    """Where something fails because of it, that is what is said."""
    error = ProgramError("A piece cannot be compiled.")
    error.__cause__ = RuntimeError("g++: fatal error: error writing to /tmp/x.s: No space left on device")
    assert _fail(error) == 9
    assert "There is no space left in" in said[0]
    assert _fail(ProgramError("A piece cannot be compiled.")) == 5


def test_weights_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is compiled."""
    usage: Any = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    example = inlay.Example(torch.nn.Linear(64, 64), (torch.ones(1, 64),))
    with pytest.raises(MachineError, match=r"The weights need [0-9.]+ MB, but .* has [0-9.]+ MB free"):
        inlay.build(example, tmp_path / "package")
    assert not (tmp_path / "package" / "current").exists()


def test_steps_without_a_terminal(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with console.progress({"reading": 1}) as step:
        step("reading")
    assert said == [], "what is quick needs no word"
    monkeypatch.setattr(console, "QUIET_SECONDS", -1.0)
    with console.progress({"reading": 1}) as step:
        step("reading")
        step("")
        step("compiling block1")
    assert said == ["   0 s  reading", "   0 s  compiling block1"]
