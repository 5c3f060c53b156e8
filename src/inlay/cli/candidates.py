"""`inlay candidates`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from inlay.cli.console import error_boundary, out, print_json, progress
from inlay.cli.model_options import DTypeOption, ModelArgument, TrustOption, read_program, resolve_config
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.cli.sizes import format_bytes

if TYPE_CHECKING:
    from inlay.insight.candidates import Candidate, CandidateSearch

_STEPS = {"transforming": 3, "matching": 8, "searching": 2, "measuring": 1}


class KernelLanguage(StrEnum):
    """Language of a generated kernel."""

    TRITON = "triton"


def candidates(
    model: ModelArgument,
    no_transforms: Annotated[bool, typer.Option("--no-transforms", help="Search the program as captured.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Run the candidates and sort them by time.")] = False,
    scaffold: Annotated[
        str | None,
        typer.Option("--scaffold", metavar="NAME", help="Write transform, YAML and test for this candidate."),
    ] = None,
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="Folder for the --scaffold files.")] = Path(),
    kernel: Annotated[
        KernelLanguage | None,
        typer.Option(
            "--kernel", help="With --scaffold: also write a kernel, if none exists: elementwise, norm, softmax."
        ),
    ] = None,
    force_kernel: Annotated[
        bool, typer.Option("--force-kernel", help="With --kernel: write it even if a kernel exists.")
    ] = False,
    files: ConfigOption = None,
    settings: SetOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Output Markdown, for documents and issues.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Find repeated operators that could be one kernel, and list existing kernels for them.

    Example: [bold]inlay candidates ./SmolLM2-135M --no-transforms --measure[/]

    Example: [bold]inlay candidates MODEL --scaffold rms_norm_rope --into my_package[/]
    """
    with error_boundary():
        from inlay.errors import UsageError

        if force_kernel and kernel is None:
            raise UsageError("--force-kernel requires --kernel triton.", "Omit it, or add --kernel triton.")
        if kernel is not None and scaffold is None:
            raise UsageError("--kernel requires --scaffold NAME.", "Run without both to list the names.")
        program = read_program(model, dtype, trust)
        with progress(_STEPS) as step:
            from inlay.insight.candidates import find_candidates
            from inlay.insight.candidates.measurement import measure as measured
            from inlay.insight.explanation import drop_contract
            from inlay.transforms import configure, run

            if not no_transforms:
                step("transforming")
                steps = configure(resolve_config(program, files, settings))
                program = run(program, [drop_contract(each) for each in steps])[0]
            search = find_candidates(program, step)
            if measure:
                search = measured(search, step)
        if scaffold is not None:
            from inlay.insight.scaffold.writer import write_scaffold

            language = kernel.value if kernel else ""
            for path in write_scaffold(search, scaffold, into, language, force_kernel):
                out.print(str(path), markup=False)
        elif as_json:
            print_json(
                {"model": program.name, "candidates": [each.to_json() for each in search.candidates]}
                | {"sizes": _sizes(), "total": vars(search.total)}
            )
        else:
            _print(search, markdown)


def _sizes() -> str:
    from inlay.insight.candidates import SIZES_TEXT

    return SIZES_TEXT


def _print(search: CandidateSearch, markdown: bool) -> None:
    if not search.candidates:
        out.print("No repeated operators could be fused further.")
        return
    for number, candidate in enumerate(search.candidates, 1):
        if markdown:
            out.print(f"### {number}. {candidate.name}\n\n```text", markup=False)
        for label, text in _block(candidate):
            out.print(Text.assemble((f"{label}:", "bold"), f" {text}"), soft_wrap=True)
        out.print("```\n" if markdown else "")
    total = search.total
    out.print(
        f"{len(search.candidates)} candidates; together at most {total.launches:,} launches and "
        f"{format_bytes(total.decode)} per row saved ({_sizes()}).",
        markup=False,
        soft_wrap=True,
    )


def _block(candidate: Candidate) -> list[tuple[str, str]]:
    """Return the labels and texts to print for one candidate."""
    saved, advice = candidate.savings, candidate.advice
    times = f"{candidate.pattern}   × {len(candidate.regions)}"
    times += f" ({candidate.sharing})" if candidate.sharing else ""
    decode, prefill = format_bytes(saved.decode), format_bytes(saved.prefill)
    gain = f"{saved.launches:,} launches, {decode} (decode), {prefill} (prefill) saved"
    if candidate.measurement is not None:
        one = candidate.measurement
        gain += f"; measured {one.seconds * 1e3:.2f} ms, at most {one.savings * 1e3:.2f} ms of it saved"
    overlaps = "".join(f"; {each}" for each in candidate.overlaps)
    return [
        ("Candidate", candidate.name),
        ("Affected graph pattern", times + (f" | {candidate.source}" if candidate.source else "")),
        ("Existing kernel lookup", advice.lookup),
        ("Evidence", advice.evidence),
        ("Recommendation", advice.recommendation.value),
        (
            "Strengths / weaknesses / risks",
            f"{gain}, {advice.strengths} / {advice.weaknesses}{overlaps} / {advice.risks}",
        ),
    ]
