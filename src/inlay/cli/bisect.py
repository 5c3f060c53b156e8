"""`inlay bisect`"""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.console import err, error_boundary, out, print_json
from inlay.cli.model_options import DTypeOption, ModelArgument, TrustOption, read_program, resolve_config
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import ExitCode

if TYPE_CHECKING:
    from inlay.insight.bisect import Culprit
    from inlay.program.program import Program


def bisect(
    model: ModelArgument,
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
    files: ConfigOption = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Find the transform and the sites that make results wrong, including pairs that are wrong only together.

    Results are compared on random inputs. If one of n sites is faulty, at most log2(n) + 3 runs are needed. The
    transforms are those of the default configuration, without `insert_kv_cache` and `pack_weights`. Exit code 0:
    nothing is wrong. Exit code 1: a faulty site was found.

    Example: [bold]inlay bisect ./my-model --oracle tokens -o repro.py[/]
    """
    with error_boundary():
        from inlay.insight.bisect import Bisection, load_answers
        from inlay.insight.oracles import make_oracle
        from inlay.integrations.external_pass import load_external_pass as external_pass
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
                resume.write_text(json.dumps(bisection.answers, indent=1))

        answers = load_answers(resume) if resume is not None else {}
        bisection = Bisection(program, steps, make_oracle(oracle, program), answers, note)
        found = bisection.find()
        if as_json:
            print_json({"runs": bisection.runs, "culprits": [vars(each) for each in found]})
        else:
            for each in found:
                out.print(_sentence(each, program), markup=False, soft_wrap=True)
            together = " The results are wrong only with all of them." if len(found) > 1 else ""
            out.print(f"{bisection.runs} runs.{together}" if found else "Nothing is wrong.")
        if found and output is not None:
            options = {
                "oracle": oracle,
                "dtype": dtype.value if dtype else "",
                "config": [str(file.resolve()) for file in files or ()],
                "settings": list(settings or ()),
                "trust_remote_code": trust,
            }
            output.write_text(_script(model, found, options))
        if found:
            raise typer.Exit(int(ExitCode.FAILED))


def _sentence(culprit: Culprit, program: Program) -> str:
    if culprit.site is None:
        return f"{culprit.transform} makes the results wrong."
    node = next((each for each in program.graph.nodes if each.name == culprit.root), None)
    source = f" ({node.meta.get('source')})" if node is not None and node.meta.get("source") else ""
    return f"{culprit.transform}, site {culprit.site}: {culprit.root}{source}."


def _script(model: str, found: list[Culprit], options: dict[str, Any]) -> str:
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
