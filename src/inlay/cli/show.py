"""`inlay show`"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from inlay.cli.console import WIDTH, out, print_json
from inlay.cli.model_options import AtOption, DTypeOption, Level, ModelArgument, TrustOption, read_program
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.cli.show_pass import show_pass, steps_up_to
from inlay.errors import UsageError

if TYPE_CHECKING:
    from inlay.program.fold import Folds
    from inlay.program.program import Program

_MOST_OPERATORS = 12


def show(
    model: ModelArgument,
    full: Annotated[bool, typer.Option("--full", help="Print every node, unfolded, as a loadable dump.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the program to this file instead of printing it.")
    ] = None,
    pass_name: Annotated[
        str | None,
        typer.Option(
            "--pass",
            metavar="NAME | package.module:callable",
            help="Run the transforms up to NAME and show what NAME changes; or run only an external pass.",
        ),
    ] = None,
    dump_to: Annotated[
        Path | None,
        typer.Option("--dump", help="With --pass: folder for dumps of each step; default: INLAY_DUMP_GRAPHS_DIR."),
    ] = None,
    files: ConfigOption = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    at: AtOption = Level.CAPTURED,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Show a model as a program: facts, repeated blocks, operators, bindings, and the folded source.

    Example: [bold]inlay show SmolLM2-135M-Instruct.Q4_1.gguf[/]

    Example: [bold]inlay show MODEL --pass fuse_add_rms_norm[/]

    Example: [bold]inlay show MODEL --pass my_passes:relu_to_gelu[/]
    """
    if pass_name is not None and output is not None:
        raise UsageError("--output and --pass cannot be combined.", "Write the programs with --dump FOLDER.")
    if pass_name is None and (files or settings):
        raise UsageError("--config and --set need --pass.", "Add --pass NAME, or leave them out.")
    if pass_name is not None:
        steps_up_to(pass_name, files or (), settings or ())  # report mistakes before the model is captured
        program = read_program(model, dtype, trust, at)
        steps = steps_up_to(
            pass_name, files or (), settings or (), model=program.name, architecture=program.facts.architecture
        )
        show_pass(program, steps, dump_to, full=full, as_json=as_json)
        return
    program = read_program(model, dtype, trust, at)
    from inlay.program.fold import fold
    from inlay.program.text.folded_printer import dump_folded
    from inlay.program.text.printer import dump, save, save_text

    folds = fold(program)
    if output is not None:
        files = save(program, output) if full else [save_text(dump_folded(program, folds=folds), output)]
        typer.echo("wrote " + ", ".join(map(str, files)), err=True)
    if as_json:
        print_json(describe(program, folds))
    elif output is None and full:
        typer.echo(dump(program), nl=False)
    elif output is None:
        _print_summary(program, folds)
        _print_source(dump_folded(program, width=max(80, min(out.width, WIDTH)), folds=folds))


def describe(program: Program, folds: Folds) -> dict[str, Any]:
    """Return the output of `inlay show --json`."""
    from inlay.lowering.state.in_place_writes import copy_remarks
    from inlay.lowering.state.state_copies import find_compiled_copies

    return {
        "name": program.name,
        "architecture": program.facts.architecture,
        "nodes": len(program),
        "facts": {name: {"value": fact.value, "from": fact.origin} for name, fact in program.facts.items()},
        "left_out": list(program.facts.left_out),
        "symbols": {symbol.name: [symbol.low, symbol.high] for symbol in program.symbols.values()},
        "folds": [
            {"times": len(kind), "nodes": kind.size, "first_node": kind.occurrences[0].nodes[0].name}
            for kind in folds.kinds
        ],
        "deviations": [{"first_node": each.nodes[0].name, "differs": each.text} for each in folds.deviations],
        "operators": dict(program.op_counts()),
        "bindings": [
            {
                "name": row.name,
                "role": row.role.value,
                "target": row.target,
                "dtype": row.dtype,
                "shape": list(row.shape),
                "alias": {"of": row.alias.binding, "why": row.alias.kind} if row.alias else None,
                "from": program.tensors[row.name].origin if row.name in program.tensors else None,
            }
            for row in program.bindings
        ],
        "remarks": [remark.to_json() for remark in copy_remarks(find_compiled_copies(program))],
    }


def _print_summary(program: Program, folds: Folds) -> None:
    from inlay.lowering.state.in_place_writes import copy_remarks
    from inlay.lowering.state.state_copies import find_compiled_copies
    from inlay.program.bindings import Role

    facts = "  ".join(f"{name.replace('_', ' ')} [bold]{fact.value}[/]" for name, fact in program.facts.items())
    odd = [f"{name}: {fact.origin}" for name, fact in program.facts.items() if "(" in fact.origin]
    out.print(Text.assemble((program.name, "bold"), f"  {program.facts.architecture}  {len(program)} nodes"))
    if facts:
        out.print(facts + (f"  [yellow]{'; '.join(odd)}[/]" if odd else ""))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if program.facts.left_out:
        table.add_row("left out", ", ".join(program.facts.left_out))
    for kind in folds.kinds:
        table.add_row("fold", f"{kind.size} nodes [bold]× {len(kind)}[/], {len(kind.output_positions)} output value(s)")
    for each in folds.deviations:
        table.add_row("deviates", f"{each.nodes[0].name} … {each.nodes[-1].name}: {each.text}")
    counts = program.op_counts()
    shown = ", ".join(f"{name.removesuffix('.default')} {count}" for name, count in counts.most_common(_MOST_OPERATORS))
    more = f", and {len(counts) - _MOST_OPERATORS} more kinds" if len(counts) > _MOST_OPERATORS else ""
    table.add_row("operators", shown + more)
    for role in (Role.PARAMETER, Role.BUFFER, Role.CONSTANT):
        if rows := program.bindings.with_role(role):
            origins = sorted({program.tensors[row.name].origin.partition("#")[0] for row in rows})
            where = ", ".join(origins[:2]) + (f" and {len(origins) - 2} more" if len(origins) > 2 else "")
            values = f", {program.parameter_count():,} values" if role is Role.PARAMETER else ""
            table.add_row(f"{role.value}s", Text(f"{len(rows)}{values} from {where}"))
    for row in (*program.bindings.with_role(Role.INPUT), *program.bindings.outs):
        alias = f" in the storage of {row.alias.binding} ({row.alias.kind})" if row.alias else ""
        table.add_row(row.role.value, Text(f"{row.name}: {row.type_text}{alias}"))
    for remark in copy_remarks(find_compiled_copies(program)):
        table.add_row("copied", Text(f"{remark.nodes[0]}: {remark.reason}"))
    if program.symbols:
        table.add_row("symbols", ", ".join(f"{symbol.name} {symbol.range_text}" for symbol in program.symbols.values()))
    out.print(table)
    out.print()


def _print_source(text: str) -> None:
    if out.is_terminal:
        out.print(Syntax(text, "python", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False)
