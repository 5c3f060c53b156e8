"""`inlay explain`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from inlay.cli.console import failing_kindly, out, print_json
from inlay.cli.models import DTypeOption, ModelArgument, TrustOption, read_program
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.cli.show_pass import steps_up_to

if TYPE_CHECKING:
    from inlay.insight import Explained

_MOST = 5


def explain(
    model: ModelArgument,
    only: Annotated[
        str | None, typer.Option("--pass", metavar="NAME", help="Explain this transform alone, and all it says.")
    ] = None,
    files: ConfigOption = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Say why transforms did not match: where they almost did, what is different there, in which layers.

    Example: [bold]inlay explain ./SmolLM2-135M[/]

    Example: [bold]inlay explain MODEL --pass match_rms_norm --json[/]
    """
    with failing_kindly():
        from inlay.config import resolve
        from inlay.errors import UsageError
        from inlay.insight import explain
        from inlay.transforms import configure
        from inlay.transforms.foreign import is_foreign

        if only is not None and is_foreign(only):
            raise UsageError(
                f"{only} does not say why it leaves something alone.", f"`inlay show MODEL --pass {only}`."
            )
        if only is not None:
            steps_up_to(only, files or (), settings or ())  # a mistake is told before the model is captured
        else:
            configure(resolve(files=files or (), settings=settings or ()))
        program = read_program(model, dtype, trust)
        name, architecture = program.name, program.facts.architecture
        if only is not None:
            steps = steps_up_to(only, files or (), settings or (), model=name, architecture=architecture)
        else:
            steps = configure(
                resolve(architecture=architecture, model=name, files=files or (), settings=settings or ())
            )
        explained = explain(program, steps, steps[-1].key if only is not None else "")
        if as_json:
            print_json([each.to_json() for each in explained])
            return
        for each in explained:
            _print(each, most=None if only is not None else _MOST)
        silent = [each.key for each in explained if not each.findings and not each.sites and each.status == "ran"]
        if silent:
            out.print(Text(f"Nothing starts like {', '.join(silent)}.", style="dim"))


def _print(explained: Explained, most: int | None) -> None:
    """One line on what matched, then what almost did, best first."""
    if not explained.sites and not explained.findings:
        return
    matched = f"matched {explained.sites}" if explained.sites else "matched nothing"
    out.print(Text.assemble((explained.key, "bold"), f"  {matched}"))
    for finding in explained.findings[:most]:
        out.print(Padding(Text(finding.text), (0, 0, 0, 2)))
        if finding.suggestion:
            out.print(Padding(Text(finding.suggestion, style="dim"), (0, 0, 0, 4)))
    if most is not None and len(explained.findings) > most:
        out.print(Padding(Text(f"… and {len(explained.findings) - most} more (--pass {explained.key})"), (0, 0, 0, 2)))
