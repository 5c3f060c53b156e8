"""`inlay candidates`"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from inlay.cli.console import out, print_json, progress
from inlay.cli.model_options import DTypeOption, OptionalModelArgument, TrustOption, read_program, resolve_config
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.sizes import format_bytes

if TYPE_CHECKING:
    from inlay.insight.candidates import Candidate, CandidateSearch
    from inlay.ops.catalog.source_tree import TreeEntry, TreeScan

_STEPS = {"transforming": 3, "matching": 8, "searching": 2, "measuring": 1}
_MOST_SHOWN = 6


def candidates(
    model: OptionalModelArgument = None,
    tree: Annotated[
        list[Path] | None,
        typer.Option("--tree", metavar="DIR", help="Also look for kernels in this source tree; repeatable."),
    ] = None,
    no_transforms: Annotated[bool, typer.Option("--no-transforms", help="Search the program as captured.")] = False,
    as_built: Annotated[
        bool, typer.Option("--as-built", help="Search the program that a build lowers, with its KV cache.")
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Run the candidates and sort them by time.")] = False,
    scaffold: Annotated[
        str | None,
        typer.Option("--scaffold", metavar="NAME", help="Write transform, YAML and test for this candidate."),
    ] = None,
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="Folder for the --scaffold files.")] = Path(),
    kernel: Annotated[
        Literal["triton"] | None,
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

    With --tree and without MODEL: list the operators, Triton kernels and patterns of a source tree.

    Example: [bold]inlay candidates ./SmolLM2-135M --no-transforms --measure[/]

    Example: [bold]inlay candidates MODEL --scaffold rms_norm_rope --into my_package[/]

    Example: [bold]inlay candidates --tree ./vllm --json[/]
    """
    from inlay.errors import UsageError

    if force_kernel and kernel is None:
        raise UsageError("--force-kernel requires --kernel triton.", "Omit it, or add --kernel triton.")
    if kernel is not None and scaffold is None:
        raise UsageError("--kernel requires --scaffold NAME.", "Run without both to list the names.")
    if no_transforms and as_built:
        raise UsageError("--no-transforms and --as-built name two programs.", "Leave one out.")
    if model is None and not tree:
        raise UsageError("There is neither MODEL nor --tree.", "Give a model, a source tree, or both.")
    if model is None and (scaffold is not None or measure):
        raise UsageError("--scaffold and --measure need MODEL.", "Omit them to list the source tree.")
    with progress({"reading": 1}) as step:
        from inlay.ops.catalog.source_tree import scan_tree

        scans = [scan_tree(each, step) for each in tree or ()]
    if model is None:
        if as_json:
            print_json({"trees": [scan.to_json() for scan in scans]})
        for scan in scans if not as_json else ():
            _print_tree(scan, markdown)
        return
    program = read_program(model, dtype, trust)
    with progress(_STEPS) as step:
        from inlay.flow import BuildOptions, prepare
        from inlay.insight.candidates import SIZES_TEXT, find_candidates, searched_text
        from inlay.insight.candidates.measurement import measure as measured
        from inlay.insight.explanation import drop_contract
        from inlay.transforms import configure, run

        if not no_transforms:
            step("transforming")
            resolved = resolve_config(program, files, settings)
            if as_built:
                prepared = prepare(program, BuildOptions(config=tuple(files or ()), settings=tuple(settings or ())))
                program, resolved = prepared.program, prepared.config
            program = run(program, [drop_contract(each) for each in configure(resolved)])[0]
        searched = searched_text(program, is_captured=no_transforms)
        search = find_candidates(program, step, [entry for scan in scans for entry in scan.entries])
        if measure:
            search = measured(search, step)
    if scaffold is not None:
        from inlay.insight.scaffold.writer import write_scaffold

        for path in write_scaffold(search, scaffold, into, kernel or "", force_kernel):
            out.print(str(path), markup=False)
    elif as_json:
        rows, trees = [each.to_json() for each in search.candidates], [scan.to_json() for scan in scans]
        found = {"model": program.name, "searched": searched, "candidates": rows, "sizes": SIZES_TEXT}
        print_json(found | {"total": vars(search.total), "trees": [each | {"entries": None} for each in trees]})
    else:
        out.print(f"Searched: {searched}.", highlight=False)
        _print(search, markdown, scans)


def _print_tree(scan: TreeScan, markdown: bool) -> None:
    """Print everything that was found in a source tree; entries of one name and kind share a line."""
    from inlay.ops.catalog.source_tree import TreeEntryKind

    for kind in TreeEntryKind:
        entries = [entry for entry in scan.entries if entry.kind is kind]
        lines = ["| name | place | registered by | signature |", "|---|---|---|---|"] if markdown else []
        for (name, by), group in groupby(entries, key=lambda entry: (entry.name, entry.registered_by)):
            first, *rest = group
            cells = [name, first.evidence + (f" and {len(rest)} more" if rest else ""), by, first.signature]
            code = ["`" + each.replace("`", "'").replace("|", "\\|") + "`" if each else "" for each in cells]
            lines.append(f"| {' | '.join(code)} |" if markdown else "  " + "  ".join(filter(None, cells)))
        title = f"{'### ' if markdown else ''}{kind.value.capitalize()}s: {len(entries):,}"
        out.print("\n".join([title, "", *lines, ""]), markup=False, soft_wrap=True)
    computed = sum("{" in entry.name for entry in scan.entries)
    text = f"{scan.coverage} {computed:,} names are computed; the unknown part is in braces."
    out.print(text, markup=False, soft_wrap=True)


def _print(search: CandidateSearch, markdown: bool, scans: list[TreeScan]) -> None:
    from inlay.insight.candidates import SIZES_TEXT

    for scan in scans:
        out.print(f"{scan.coverage}\n", markup=False, soft_wrap=True)
    if not search.candidates:
        out.print("No repeated operators could be fused further.")
        return
    for number, candidate in enumerate(search.candidates, 1):
        if markdown:
            out.print(f"### {number}. {candidate.name}\n\n```text", markup=False)
        for label, text in _block(candidate, bool(scans)):
            out.print(Text.assemble((f"{label}:", "bold"), f" {text}"), soft_wrap=True)
        out.print("```\n" if markdown else "")
    total, count = search.total, len(search.candidates)
    out.print(
        f"{count} candidate{'' if count == 1 else 's'}; together at most {total.launches:,} launches and "
        f"{format_bytes(total.decode)} per row saved ({SIZES_TEXT}).",
        markup=False,
        soft_wrap=True,
    )


def _block(candidate: Candidate, has_trees: bool) -> list[tuple[str, str]]:
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
        *([("Same name in the source trees (check what it computes)", _places(advice.tree))] if has_trees else []),
        ("Support", advice.support.value),
        ("Numerical risk", candidate.risk.value),
        ("Recommendation", advice.recommendation.value),
        (
            "Strengths / weaknesses / risks",
            f"{gain}, {advice.strengths} / {advice.weaknesses}{overlaps} / {advice.risks}",
        ),
    ]


def _places(entries: tuple[TreeEntry, ...]) -> str:
    """Return names and places of entries on one line."""
    texts = [f"{entry.name} ({entry.kind}, {entry.evidence})" for entry in entries[:_MOST_SHOWN]]
    return "; ".join(texts + [f"{len(entries) - _MOST_SHOWN} more"] * (len(entries) > _MOST_SHOWN)) or "none"
