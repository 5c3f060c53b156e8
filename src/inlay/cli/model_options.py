"""MODEL on the command line: the same argument and options for every verb that takes one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.console import progress
from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.config import ConfigFile, ResolvedConfig
    from inlay.program.program import Program

_FORMS = (
    "Hugging Face folder or id (org/name@revision), GGUF file, .pt2 file of torch.export.save, or"
    " package.module:function (returns inlay.Example)"
)
BuildModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=f"{_FORMS}.", show_default=False)]
_MODEL = typer.Argument(
    metavar="MODEL", help=f"{_FORMS}, or a file written by `inlay show --full -o FILE.py`.", show_default=False
)
ModelArgument = Annotated[str, _MODEL]
OptionalModelArgument = Annotated[str | None, _MODEL]

PackageOrModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|PACKAGE",
        help=f"A package that `inlay build` wrote, or a model: {_FORMS}. A model is built on first use and cached.",
        show_default=False,
    ),
]

CAPTURE_STEPS = {"importing": 2, "opening": 3, "exporting": 8, "making": 12, "reading": 1}
"""The steps of a capture, by first word, and how long each takes relative to the others."""
BUILD_STEPS = {**CAPTURE_STEPS, "transforming": 6, "compiling": 15, "writing weights": 2, "writing the package": 6}


class DType(StrEnum):
    """dtype to capture a model in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Level(StrEnum):
    """Which program of a model is meant."""

    CAPTURED = "captured"
    POST_GRAD = "post-grad"


class WeightFormat(StrEnum):
    """Number format of the weights of a package."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    STORED = "stored"
    INT4 = "int4"
    INT4_G64 = "int4-g64"
    INT4_G128 = "int4-g128"
    INT8 = "int8"


class CodeTarget(StrEnum):
    """What code is made for."""

    NATIVE = "native"
    PORTABLE = "portable"


DTypeOption = Annotated[
    DType | None, typer.Option("--dtype", help="dtype to capture in; by default that of the checkpoint.")
]
AtOption = Annotated[
    Level,
    typer.Option("--at", help="captured: from torch.export. post-grad: after Inductor's post-grad passes."),
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code from the model's repository.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 selects the most likely token.")]
TopPOption = Annotated[
    float, typer.Option("--top-p", help="Sample from the most likely tokens with this total probability.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed for sampling; the same seed repeats a result.")]
MAX_LENGTH, MAX_BATCH = 2048, 8
_LENGTH = f"Maximum tokens of a sequence, prompt included; {MAX_LENGTH} by default."
_BATCH = f"Maximum sequences that run at the same time; {MAX_BATCH} by default."
BuildMaxLengthOption = Annotated[int | None, typer.Option("--max-length", min=1, help=_LENGTH)]
BuildMaxBatchOption = Annotated[int | None, typer.Option("--max-batch", min=1, help=_BATCH)]
MaxLengthOption = Annotated[
    int | None, typer.Option("--max-length", min=1, help=f"{_LENGTH} Not allowed with PACKAGE.")
]
MaxBatchOption = Annotated[int | None, typer.Option("--max-batch", min=1, help=f"{_BATCH} Not allowed with PACKAGE.")]
WeightsOption = Annotated[
    WeightFormat | None,
    typer.Option(
        "--weights",
        metavar="FORMAT",
        help="Number format of the weights; by default that of the checkpoint. stored: blocks of a GGUF file (Q4_0 to"
        " Q8_0 and Q4_K to Q6_K unchanged, others as int8) or of a GPTQ or AWQ checkpoint. int4, int4-g64, int4-g128,"
        " int8: quantized. float32, bfloat16, float16: cast.",
    ),
]


def ensure_package(
    target: str,
    max_length: int | None = None,
    max_batch: int | None = None,
    weights: WeightFormat | None = None,
    settings: Sequence[str] | None = None,
    trust: bool = False,
) -> str:
    """Return the package that MODEL|PACKAGE names. A model is built into the package cache, with a progress bar."""
    from inlay.package_cache import PackageCache, is_package

    asked = {"--max-length": max_length, "--max-batch": max_batch, "--weights": weights, "--set": settings}
    if is_package(target):
        given = [name for name, value in asked.items() if value] + ["--trust-remote-code"] * trust
        if given:
            raise UsageError(
                f"{target} is a package, and {', '.join(given)} would change how it is built.",
                "Pass the model instead, or leave the option out.",
            )
        return target
    options = {
        "max_length": max_length or MAX_LENGTH,
        "max_batch": max_batch or MAX_BATCH,
        "weights": weights.value if weights else "",
        "settings": tuple(settings or ()),
        "trust_remote_code": trust,
    }
    with progress(BUILD_STEPS) as step:
        return str(PackageCache().ensure(target, options, step))


def resolve_config(
    program: Program, files: Sequence[Path | ConfigFile] | None, settings: Sequence[str] | None
) -> ResolvedConfig:
    """The configuration for a program: defaults, overlays for its architecture, files and settings."""
    from inlay.config import resolve_config

    architecture, model = program.facts.architecture, program.name
    return resolve_config(architecture=architecture, model=model, files=files or (), settings=settings or ())


def read_program(text: str, dtype: DType | None, trust: bool, at: Level = Level.CAPTURED) -> Program:
    """Capture MODEL, or read it when it is a dump, with a progress bar."""
    if at is Level.POST_GRAD:
        captured = read_program(text, dtype, trust)
        with progress({"running": 1}) as step:
            step("running Inductor's passes")
            from inlay.integrations.post_grad import post_grad_program

            return post_grad_program(captured)
    with progress(CAPTURE_STEPS) as step:
        step("importing torch")
        if text.endswith(".py") and Path(text).is_file():
            from inlay.program.text.parser import load

            if dtype is not None:
                raise UsageError(f"--dtype was given, but {text} is a dump, which has its types.", "Leave it out.")
            step("reading the dump")
            return load(text)
        import torch

        from inlay.frontend import capture
        from inlay.frontend.huggingface.checkpoint import HFOptions

        options = HFOptions(getattr(torch, dtype.value) if dtype else None, trust)
        return capture(text, options, on_step=step)
