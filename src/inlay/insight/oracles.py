"""Oracles: is a transformed program still good? By its scores, by the tokens they choose, or by what a command says."""

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
    """`logits`, `tokens`, or a command that is given a dump of the program and ends with 0 when it is good."""
    if text == "logits":
        return _logits(program, seed)
    if text == "tokens":
        return _tokens(program, seed)
    if not shlex.split(text):
        raise UsageError("The oracle is empty.", "Name logits, tokens, or a command.")
    return _command(shlex.split(text))


def _logits(program: Program, seed: int) -> Oracle:
    """Good as long as the error against float64 is what rounding makes it."""
    runner, inputs = ProgramInterpreter(), random_inputs(program, seed)
    referee = runner(program, inputs, compute_dtype=torch.float64)
    before = runner(program, inputs)

    def good(made: Program) -> bool:
        results = _results(runner, made, inputs)
        return results is not None and not is_wrong(before, results, referee)

    return good


def _tokens(program: Program, seed: int) -> Oracle:
    """Good as long as the likeliest token is the same at every position."""
    runner, inputs = ProgramInterpreter(), random_inputs(program, seed)
    expected = [_argmax_tokens(each) for each in runner(program, inputs)]

    def good(made: Program) -> bool:
        results = _results(runner, made, inputs)
        return results is not None and all(
            torch.equal(one, _argmax_tokens(two)) for one, two in zip(expected, results, strict=True)
        )

    return good


def _argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each position, -1 where a logit is not a number."""
    return logits.argmax(-1).masked_fill(logits.isnan().any(-1), -1)


def _results(runner: ProgramInterpreter, made: Program, inputs: dict[str, Any]) -> list[Any] | None:
    """None of a program that cannot be run, which is as wrong as can be."""
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
