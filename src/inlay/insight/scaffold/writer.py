"""Write the files of a scaffold."""

from __future__ import annotations

from string import Template
from typing import TYPE_CHECKING

from inlay.errors import UsageError, suggest
from inlay.insight.scaffold.region_source import ExampleShapes, RegionSource, is_float
from inlay.insight.scaffold.templates import TEST, TRANSFORM, TRITON_TEST, YAML

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.insight.candidates import Candidate, CandidateSearch
    from inlay.program.program import Program


def write_scaffold(
    search: CandidateSearch, name: str, folder: Path, kernel: str = "", force_kernel: bool = False
) -> list[Path]:
    """Write transform, YAML entry and test for a candidate into a folder; with `kernel`, a kernel and its test.

    A kernel is refused if one exists, unless `force_kernel` is set.
    """
    candidate = _select_candidate(search, name)
    if kernel and candidate.advice.kernels and not force_kernel:
        first = candidate.advice.kernels[0]
        raise UsageError(
            f"{name} does not need a new kernel: {first.name} computes it ({first.evidence}).",
            "Omit --kernel, or add --force-kernel.",
        )
    fields = _fields(candidate, search.program)
    files = {f"fuse_{name}.py": TRANSFORM, f"fuse_{name}.yaml": YAML, f"test_fuse_{name}.py": TEST}
    if kernel:
        from inlay.insight.scaffold.triton_kernel import generate_kernel

        fields |= generate_kernel(candidate, RegionSource(candidate.regions[0]))
        files |= {f"{name}_triton.py": "$triton_source", f"test_{name}_triton.py": TRITON_TEST}
    taken = [file for file in files if (folder / file).exists()]
    if taken:
        raise UsageError(f"{folder / taken[0]} already exists.", "Choose another folder with --into.")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(Template(text).substitute(fields))
    return [folder / file for file in files]


def _select_candidate(search: CandidateSearch, name: str) -> Candidate:
    known = {each.name: each for each in search.candidates}
    if name not in known:
        hint = suggest(name, known) or f"Candidates: {', '.join(known)}." if known else "There are no candidates."
        raise UsageError(f"There is no candidate {name}.", hint)
    transform = known[name].regions[0].transform
    if transform:
        raise UsageError(f"{transform} already does this.", f"Enable it with --set {transform}.enabled=true.")
    return known[name]


def _fields(candidate: Candidate, program: Program) -> dict[str, str]:
    """Return the template fields of a candidate."""
    calls, shapes = RegionSource(candidate.regions[0]), ExampleShapes(program)
    body = "\n".join(f"    {line}" for line in calls.statements())
    names = list(calls.inputs.values())
    floats = [name for node, name in calls.inputs.items() if is_float(node)]
    values = list(dict.fromkeys([*calls.kernels, *calls.outputs]))
    outputs = [values.index(each) for each in calls.outputs]
    inside = next((index for index in range(len(values)) if index not in outputs), None)
    plural = len(outputs) > 1
    picked = "(" + ", ".join(f"values[{index}]" for index in outputs) + ")" if plural else f"values[{outputs[0]}]"
    axes = {name: shapes.axes(node.meta["val"]) for node, name in calls.inputs.items()}
    return {
        "name": candidate.name,
        "title": "".join(part.capitalize() for part in candidate.name.split("_")),
        "pattern": _truncate(candidate.pattern),
        "model": program.name,
        "times": str(len(candidate.regions)),
        "source": candidate.source or "the model",
        "body": body,
        "kernels": ", ".join(values) + ("," if len(values) == 1 else ""),
        "arguments": ", ".join(f"{name}: Tensor" for name in names),
        "names": ", ".join(names),
        "result": f"tuple[{', '.join(['Tensor'] * len(outputs))}]" if plural else "Tensor",
        "picked": picked,
        "shared": f"values[0], calls({', '.join([f'{names[0]} + 1', *names[1:]])})[-1]"
        if inside is None
        else f"{picked}, values[{inside}].neg()",
        "shared_name": "two inputs" if inside is None else "another consumer",
        "loose": repr(sorted(calls.ignored_args)),
        "examples": _examples(calls, shapes, False),
        "others": _examples(calls, shapes, True),
        "axes": repr({name: each for name, each in axes.items() if each}),
        "floats": repr(floats),
        "numerics": "EXACT",
        "evidence": candidate.advice.evidence,
        "recommendation": candidate.advice.recommendation.value,
        "dtype": candidate.dtype,
        "device": "",
        "more": "",
    }


def _examples(calls: RegionSource, shapes: ExampleShapes, others: bool) -> str:
    rows = []
    for node, name in calls.inputs.items():
        dtype = "dtype" if is_float(node) else str(node.meta["val"].dtype)
        rows.append(f'"{name}": torch.ones({shapes.shape(node.meta["val"], others)}, dtype={dtype})')
    return ", ".join(rows)


def _truncate(text: str) -> str:
    return text if len(text) <= 110 else text[:107] + "…"
