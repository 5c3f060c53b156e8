"""`inlay bisect`"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.console import err, out, print_json
from inlay.cli.model_options import DTypeOption, TrustOption, read_program, resolve_config
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.insight.bisect import Culprit


def bisect(
    words: Annotated[
        list[str],
        typer.Argument(metavar="MODEL|COMMAND", help="A model (see `inlay show`), or with --watch a program."),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Find the match that makes a program fail.")] = False,
    oracle: Annotated[
        str,
        typer.Option(
            "--oracle",
            metavar="logits | tokens | COMMAND",
            help="How a program is judged. logits: close to float64 results. tokens: same most likely tokens."
            " COMMAND: is called with the path of a dump and exits with 0 if it is correct.",
        ),
    ] = "logits",
    passes: Annotated[
        list[str] | None,
        typer.Option("--pass", metavar="package.module:callable", help="External pass to run after the transforms."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--state", help="Store finished runs in this file, and continue from it next time.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a reproduction script.")] = None,
    find_all: Annotated[bool, typer.Option("--all", help="Find every wrong site, not only the first three.")] = False,
    files: ConfigOption = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Find the transform and the sites that make results wrong, including pairs that are wrong only together.

    Results are compared on random inputs. If one of n sites is faulty, at most log2(n) + 4 runs are needed. The
    transforms are those of the default configuration, without `insert_kv_cache` and `pack_weights`. Exit code 0:
    nothing is wrong. Exit code 1: a faulty site was found.

    With --watch, the exit code of the program says whether it is good: 0 is good, 125 cannot judge, another one is bad.

    Example: [bold]inlay bisect ./my-model --oracle tokens -o repro.py[/]

    Example: [bold]inlay bisect --watch -- python compare.py[/]
    """
    if watch:
        if any((passes, resume, output, find_all, files, settings, dtype, trust, oracle != "logits")):
            raise UsageError("With --watch, the only other option is --json.", "See `inlay bisect --help`.")
        _bisect_watched(words, as_json)
        return
    model, *more = words
    if more:
        raise UsageError(f"{more[0]} is one argument too many.", "Name one model, or a program with --watch.")
    from inlay.insight.bisect import Bisection, load_answers, save_answers
    from inlay.insight.oracles import make_oracle
    from inlay.integrations.external_pass import load_external_pass as external_pass
    from inlay.package.files import stamp
    from inlay.package_cache import compute_key
    from inlay.program.text.printer import dump
    from inlay.transforms import configure
    from inlay.transforms.pass_manager import TransformStep

    program = read_program(model, dtype, trust)
    steps = [
        *configure(resolve_config(program, files, settings)),
        *(TransformStep(text, external_pass(text)) for text in passes or ()),
    ]

    def note(text: str, good: bool) -> None:
        err.print(f"{'good' if good else 'bad '} {text}", markup=False, soft_wrap=True)
        if resume is not None:
            save_answers(resume, key, bisection.answers)

    asked = {"oracle": oracle, "passes": passes, "config": files or (), "settings": settings, "dtype": dtype}
    code = [stamp(Path(str(sys.modules[text.partition(":")[0]].__file__))) for text in passes or ()]
    key = hashlib.sha256(repr((compute_key(model, asked), dump(program), code)).encode()).hexdigest()
    answers = load_answers(resume, key) if resume is not None else {}
    bisection = Bisection(program, steps, make_oracle(oracle, program), answers, note)
    found = bisection.find_all(None if find_all else 3)
    if as_json:
        print_json(found.to_json())
    else:
        for line in (*found.sentences, f"{found.runs} runs."):
            out.print(line, markup=False, soft_wrap=True)
    if found.groups and output is not None:
        options = {
            "oracle": oracle,
            "dtype": dtype.value if dtype else "",
            "config": [str(file.resolve()) for file in files or ()],
            "settings": list(settings or ()),
            "trust_remote_code": trust,
        }
        output.write_text(_script(model, found.groups[0], options))
    if found.groups:
        raise typer.Exit(int(ExitCode.FAILED))


def _bisect_watched(command: list[str], as_json: bool) -> None:
    """Find the match that makes a program fail."""
    from inlay.cli.watch import run_watched
    from inlay.insight.watch.bisection import ALL, AppliedMatch, find_bad_match, read_matches

    def run(limit: int) -> tuple[bool | None, list[AppliedMatch]]:
        with tempfile.TemporaryDirectory() as folder:
            made = run_watched(command, Path(folder), limit=limit)
            matches = read_matches(Path(folder))
        verdict = {0: "good", 125: "skip"}.get(made.returncode, "bad ")
        last = [line for line in made.stdout.splitlines() if line.strip()][-1:]
        said = f": exit code {made.returncode}: {''.join(last)}" if made.returncode else ""
        amount = "all" if limit == ALL else f"the first {limit}"
        err.print(f"{verdict} with {amount} matches{said}", markup=False, soft_wrap=True)
        return {"good": True, "skip": None}.get(verdict, False), matches

    found = find_bad_match(run)
    if as_json:
        print_json(found and asdict(found))
    elif found is None:
        out.print("The program is good with all matches.")
    else:
        which = f"match {found.bad}" if found.bad == found.good + 1 else f"one of matches {found.good + 1}–{found.bad}"
        out.print(f"The program fails with {which} of {found.total}, and not with the first {found.good}:")
        for each in found.matches:
            source = f" ({each.source})" if each.source else ""
            text = f"pass {each.pass_name}, pattern {each.pattern}, node {each.node}{source}"
            out.print(f"  {each.number}: {text}", markup=False, soft_wrap=True)
        out.print(f"{found.runs} runs.")
    if found is not None:
        raise typer.Exit(int(ExitCode.FAILED))


def _script(model: str, found: Sequence[Culprit], options: dict[str, Any]) -> str:
    """Return a script that runs the model with and without the culprits."""
    chosen: dict[str, set[int] | None] = {}
    for each in found:
        chosen[each.transform] = None if each.site is None else {*(chosen.get(each.transform) or ()), each.site}
    given = [(name, value) for name, value in options.items() if value]
    about = ", ".join(f"{each.transform} at {each.root or 'all sites'}" for each in found)
    lines = (
        f'"""{model}: {about}."""',
        "",
        "from inlay.insight.reproduction import reproduce",
        "",
        f"reproduce({', '.join([repr(model), repr(chosen), *(f'{name}={value!r}' for name, value in given)])})",
    )
    return "\n".join(lines) + "\n"
