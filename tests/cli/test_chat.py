"""`inlay chat`: turns, commands and errors, read from standard input."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import inlay

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = ("--temperature", "0", "--max-tokens", "6")


def _chat(package: Path, said: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inlay", "chat", str(package), *OPTIONS, *options]
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=600)


def test_turns_commands_and_errors(package: Path) -> None:
    long = "fox " * 5000
    done = _chat(package, f"fox\ndog\n/clear\nfox\n/help\n{long}\nfox\n/exit\nnot read\n", "--system", "Be brief.")
    assert done.returncode == 0, done.stderr
    model = inlay.load(package)
    system, fox = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "fox"}
    first = model.generate([system, fox], max_tokens=6).text
    answer, dog = {"role": "assistant", "content": first}, {"role": "user", "content": "dog"}
    second = model.generate([system, fox, answer, dog], max_tokens=6).text
    third = model.generate([system, fox, {"role": "assistant", "content": first}, fox], max_tokens=6).text
    assert done.stdout == "".join(f"{text}\n" for text in (first, second, first, third))
    assert "/clear starts a new conversation" in done.stderr
    assert "error: " in done.stderr


def test_end_of_input_ends_it(package: Path) -> None:
    assert _chat(package, "").returncode == 0
