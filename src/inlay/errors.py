"""Errors with a remedy: one sentence for the problem, one for what to do."""

from __future__ import annotations

from difflib import get_close_matches
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ExitCode(IntEnum):
    """Exit codes of `inlay`; documented in docs/cli.md.

    >>> int(ExitCode.MODEL)
    3
    """

    OK = 0
    FAILED = 1
    """A check ran and failed (`inlay doctor`, `inlay prove`)."""
    USAGE = 2
    """The command line is wrong."""
    MODEL = 3
    """MODEL cannot be found, read or parsed."""
    CAPTURE = 4
    """The model was read, but no program could be captured from it."""
    PROGRAM = 5
    """A program or its dump is malformed."""
    TRANSFORM = 6
    """A transform failed; the program is unchanged."""
    CONTRACT = 7
    """A transform did not match as often as its contract requires."""
    PACKAGE = 8
    """A package is damaged, does not fit this machine, or is not a package."""
    MACHINE = 9
    """The machine lacks a resource: disk space or a free port."""
    INTERNAL = 70
    """A defect of Inlay: please report it."""


class InlayError(Exception):
    """An error with a remedy. The command line prints `str()` of it.

    >>> print(InlayError("The file is empty.", "Download it again."))
    The file is empty. Download it again.
    """

    exit_code = ExitCode.INTERNAL

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem} {self.remedy}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle any subclass, whatever its constructor takes: errors cross processes."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class MachineError(InlayError):
    """The machine lacks a resource, such as disk space."""

    exit_code = ExitCode.MACHINE


class UsageError(InlayError):
    """The call is wrong: a name, an option or a combination."""

    exit_code = ExitCode.USAGE


class ModelError(InlayError):
    """MODEL cannot be found, read or parsed."""

    exit_code = ExitCode.MODEL


class CaptureError(InlayError):
    """torch.export could not turn the model into a program."""

    exit_code = ExitCode.CAPTURE


class ProgramError(InlayError):
    """A program or its text form is malformed."""

    exit_code = ExitCode.PROGRAM


class TransformError(InlayError):
    """A transform failed. Its input program is unchanged."""

    exit_code = ExitCode.TRANSFORM


class ContractError(InlayError):
    """A transform did not match as often as its contract requires."""

    exit_code = ExitCode.CONTRACT


class PackageError(InlayError):
    """A package cannot be read or does not fit this machine. None of its code was run."""

    exit_code = ExitCode.PACKAGE


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the closest valid name, or an empty string.

    >>> suggest("fuse_norn", ["fuse_norm", "match_rope"])
    'Did you mean fuse_norm?'
    """
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]}?" if close else ""


def one_line(error: BaseException, limit: int = 160) -> str:
    """Return the first non-empty line of an exception, for use inside a sentence.

    >>> one_line(ValueError("bad\\nlong explanation"))
    'bad'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".") if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def printable(text: str, limit: int = 2000) -> str:
    """Return a text of limited length on one line, without control characters.

    >>> printable("rms_norm(Tensor x,\\n    float eps)\\x1b[0m")
    'rms_norm(Tensor x, float eps)�[0m'
    """
    line = "".join(each if each.isprintable() else "�" for each in " ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"
