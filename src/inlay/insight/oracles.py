"""Oracles that decide whether a transformed program is good: by logits, by argmax tokens, or by an external command."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import UsageError
from inlay.insight.interpreter import ProgramInterpreter, random_inputs
from inlay.insight.verify import is_wrong
from inlay.program.text.printer import save

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program.program import Program

    Oracle = Callable[[Program], bool]


def make_oracle(text: str, program: Program, seed: int = 0) -> Oracle:
    """Return an oracle: `logits`, `tokens`, or a command that takes a program dump and exits with 0 if it is good."""
    if text == "logits":
        return _logits(program, seed)
    if text == "tokens":
        return _tokens(program, seed)
    if not shlex.split(text):
        raise UsageError("The oracle is empty.", "Name logits, tokens, or a command.")
    return _command(shlex.split(text))


def _logits(program: Program, seed: int) -> Oracle:
    """Return an oracle that accepts errors against float64 that rounding explains."""
    runner, inputs = ProgramInterpreter(), random_inputs(program, seed)
    referee = runner(program, inputs, compute_dtype=torch.float64)
    before = runner(program, inputs)

    def good(made: Program) -> bool:
        results = _results(runner, made, inputs)
        return results is not None and not is_wrong(before, results, referee)

    return good


def _tokens(program: Program, seed: int) -> Oracle:
    """Return an oracle that requires the same argmax token at every position."""
    runner, inputs = ProgramInterpreter(), random_inputs(program, seed)
    expected = [_argmax_tokens(each) for each in runner(program, inputs)]

    def good(made: Program) -> bool:
        results = _results(runner, made, inputs)
        return results is not None and all(
            torch.equal(one, _argmax_tokens(two)) for one, two in zip(expected, results, strict=True)
        )

    return good


def _argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax token of each position, -1 where a logit is NaN."""
    return logits.argmax(-1).masked_fill(logits.isnan().any(-1), -1)


def _results(runner: ProgramInterpreter, made: Program, inputs: dict[str, Any]) -> list[Any] | None:
    """Return the results of a program; None if it fails, which counts as bad."""
    try:
        return runner(made, inputs)
    except RuntimeError:
        return None


def _command(words: list[str]) -> Oracle:
    def good(made: Program) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "program.py")
            save(made, file)
            try:
                return subprocess.run([*words, str(file)], check=False).returncode == 0
            except OSError as error:
                raise UsageError(f"{words[0]} cannot be run.", "Check --oracle.") from error

    return good
