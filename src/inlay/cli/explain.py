"""`inlay explain`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from inlay.cli.console import error_boundary, out, print_json
from inlay.cli.model_options import DTypeOption, ModelArgument, TrustOption, read_program
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.cli.show_pass import steps_up_to

if TYPE_CHECKING:
    from inlay.insight import Explanation

_MOST = 5


def explain(
    model: ModelArgument,
    pass_name: Annotated[
        str | None, typer.Option("--pass", metavar="NAME", help="Explain only this transform, with all its remarks.")
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also print trivial misses: one node, or under half.")
    ] = False,
    files: ConfigOption = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Explain why transforms did not match: near misses, what differs there, and in which layers.

    First come the transforms that matched nothing and have near misses.

    Example: [bold]inlay explain ./SmolLM2-135M[/]

    Example: [bold]inlay explain MODEL --pass match_rms_norm --json[/]
    """
    with error_boundary():
        from inlay.config import resolve_config
        from inlay.errors import UsageError
        from inlay.insight import explain
        from inlay.integrations.external_pass import is_external
        from inlay.transforms import configure

        if pass_name is not None and is_external(pass_name):
            raise UsageError(
                f"{pass_name} is an external pass and has no remarks.", f"Run `inlay show MODEL --pass {pass_name}`."
            )
        if pass_name is not None:
            steps_up_to(pass_name, files or (), settings or ())  # report mistakes before the model is captured
        else:
            configure(resolve_config(files=files or (), settings=settings or ()))
        program = read_program(model, dtype, trust)
        name, architecture = program.name, program.facts.architecture
        if pass_name is not None:
            steps = steps_up_to(pass_name, files or (), settings or (), model=name, architecture=architecture)
        else:
            steps = configure(
                resolve_config(architecture=architecture, model=name, files=files or (), settings=settings or ())
            )
        explained = explain(program, steps, steps[-1].key if pass_name is not None else "")
        if as_json:
            print_json([each.to_json() for each in explained])
            return
        near = sum(len(finding.roots) for each in explained for finding in each.near_misses)
        hidden = sum(len(finding.roots) for each in explained for finding in each.findings) - near
        shown = "shown" if show_all else "hidden, --all shows them"
        trivial = f"; {hidden} trivial ones {shown}" if hidden else ""
        if pass_name is None or hidden:
            out.print(f"{near} near miss{'' if near == 1 else 'es'}{trivial}.", highlight=False)
        for each in sorted(explained, key=lambda each: (bool(each.sites), not each.near_misses)):
            _print(each, show_all, most=None if pass_name is not None else _MOST)
        silent = [each for each in explained if not each.near_misses and not each.sites]
        if ran := [each.key for each in silent if each.status == "ran"]:
            out.print(Text(f"No match and no near miss: {', '.join(ran)}.", style="dim"))
        if skipped := [f"{each.key} ({each.skip_reason})" for each in silent if each.status == "skipped"]:
            out.print(Text(f"Skipped: {', '.join(skipped)}.", style="dim"))


def _print(explained: Explanation, show_all: bool, most: int | None) -> None:
    """Print the number of matches, then the near misses, closest first."""
    findings = explained.findings if show_all else explained.near_misses
    if not explained.sites and not findings:
        return
    matched = f"matched {explained.sites}" if explained.sites else "matched nothing"
    out.print(Text.assemble((explained.key, "bold"), f"  {matched}"))
    for finding in findings[:most]:
        out.print(Padding(Text(finding.text), (0, 0, 0, 2)))
        if finding.suggestion:
            out.print(Padding(Text(finding.suggestion, style="dim"), (0, 0, 0, 4)))
    if most is not None and len(findings) > most:
        out.print(Padding(Text(f"… and {len(findings) - most} more (--pass {explained.key})"), (0, 0, 0, 2)))
