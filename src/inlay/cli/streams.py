"""`inlay streams`"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli.console import err, make_table, out, print_json, progress
from inlay.cli.model_options import DTypeOption, TrustOption, read_program
from inlay.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inlay.program.program import Program


def streams(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model (see `inlay show`).", show_default=False)
    ] = None,
    lanes: Annotated[int, typer.Option("--lanes", min=2, help="Number of lanes (threads).")] = 2,
    length: Annotated[
        int, typer.Option("--length", min=1, help="Input tokens, limited to the range of the model. The batch is 1.")
    ] = 128,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="How often each variant is measured.")] = 10,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="DIR", help="Folder for work.json, schedule.json, timeline.json and the chart."
        ),
    ] = None,
    schedule: Annotated[
        Path | None,
        typer.Option(
            "--check", metavar="FILE|DIR", help="Only check a schedule, with work.json in its folder. No MODEL."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Schedule independent operators on parallel lanes, check the schedule for races, and measure the speedup.

    Operators are measured one by one on random inputs and merged into tasks. Lanes are threads. Exit code 1: the
    schedule has a race, or results differ from those of one lane.

    Example: [bold]inlay streams ./SmolLM2-135M --length 256 -o lanes[/]

    Example: [bold]inlay streams --check lanes/schedule.json[/]
    """
    if model is not None and schedule is None:
        if output is not None:
            _make(output)
        fine = _run(read_program(model, dtype, trust), lanes, length, rounds, output, as_json)
    elif schedule is not None and model is None:
        fine = _check(schedule, as_json)
    else:
        raise UsageError("Expected either MODEL or --check.", "See `inlay streams --help`.")
    if not fine:
        raise typer.Exit(int(ExitCode.FAILED))


def _check(path: Path, as_json: bool) -> bool:
    from inlay.streams import Schedule, WorkGraph, check_schedule

    file = path / "schedule.json" if path.is_dir() else path
    try:
        made, work = file.read_bytes(), (file.parent / "work.json").read_bytes()
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}.", "Create it with --output.") from error
    verdict = check_schedule(WorkGraph.from_json(work), Schedule.from_json(made))
    if as_json:
        print_json({"ok": verdict.ok, "flaws": list(map(str, verdict.errors)), "races": list(map(str, verdict.races))})
    else:
        typer.echo(verdict)
    return verdict.ok


def _run(program: Program, lanes: int, length: int, rounds: int, output: Path | None, as_json: bool) -> bool:
    from inlay.lowering.state.buffers import lift_mutated_buffers
    from inlay.lowering.state.in_place_writes import write_in_place
    from inlay.streams import compare_lanes, plan_overlap
    from inlay.streams.overlap_comparison import output_files

    names = {number: f"round {number} of {rounds}" for number in range(1, rounds + 1)}
    with progress({"measuring": rounds, "warming": 2} | dict.fromkeys(names.values(), 1)) as step:
        step("measuring operators")
        program = write_in_place(lift_mutated_buffers(program)).program
        sizes = choose_sizes(program, length)
        given = build_inputs(program, sizes)
        plan = plan_overlap(program, given, lanes)
        step("warming up")
        compared = compare_lanes(
            plan, given, threads=lanes, rounds=rounds, on_round=lambda number: step(names.get(number, ""))
        )
    if output is not None:
        files = output_files(plan, compared, f"{program.name}, {compared.lanes_name}")
        for name, text in files.items():
            (output / name).write_text(text)
        err.print(f"wrote {', '.join(files)} to {output}", markup=False, soft_wrap=True)
    facts = {
        **{"model": program.name, "sizes": sizes, "event_seconds": plan.event_seconds, "plan": plan.metrics()},
        **{
            "bit_for_bit": compared.is_identical,
            "seconds": compared.metrics(),
            "pays": compared.is_faster,
            "says": str(compared),
        },
    }
    print_json(facts) if as_json else _print(facts)
    return compared.is_identical


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be created: {error.strerror}.", "Choose another folder.") from error


def _print(facts: Mapping[str, Any]) -> None:
    from inlay.streams.timeline import format_seconds

    sizes = ", ".join(f"{name} {size}" for name, size in facts["sizes"].items()) or "fixed sizes"
    out.print(f"{facts['model']}; inputs: {sizes}\n", markup=False, soft_wrap=True)
    figures = [
        "—" if each is None else f"{each:.2f}" if isinstance(each, float) else str(each)
        for each in facts["plan"].values()
    ]
    _table(facts["plan"], [figures])
    same = "are identical to" if facts["bit_for_bit"] else "differ from"
    out.print(f"\nThe schedule has no race. Results and states {same} those of one lane.\n")
    rows = []
    for way, each in facts["seconds"].items():
        *times, over = each.values()
        rows.append([way, *map(format_seconds, times), f"{over:.2f}"])
    _table(["", *each], rows)
    out.print(f"\n{facts['says']}", soft_wrap=True)


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    names = [name.replace("over_", "÷ ").replace("_", " ") for name in columns]
    table = make_table(*names, right=[name for name in names if name])
    for row in rows:
        table.add_row(*row)
    out.print(table, markup=False)


def choose_sizes(program: Program, length: int) -> dict[str, int]:
    """Return a number for every symbol: 1 for the batch and `length` for others, clamped to its range.

    >>> from types import SimpleNamespace
    >>> from inlay.program.program import Symbol
    >>> symbols = {"s0": Symbol("batch", 1, None), "s1": Symbol("length", 1, 64)}
    >>> choose_sizes(SimpleNamespace(symbols=symbols), 128)
    {'batch': 1, 'length': 64}
    """
    return {
        each.name: max(each.low, min(1 if each.name == "batch" else length, each.high or length))
        for each in program.symbols.values()
    }


def build_inputs(program: Program, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return random inputs by name. States have the values of the module, or zeros if the caller owns them."""
    from inlay.insight.interpreter import random_inputs

    given = random_inputs(program, sizes=sizes)
    for row in program.bindings.state:
        if row.name in given:
            held = program.tensors.get(row.name)
            given[row.name] = given[row.name].zero_() if held is None else held.read()
    return given
