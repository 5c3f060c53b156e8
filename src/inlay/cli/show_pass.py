"""`inlay show MODEL --pass NAME`: the program before and after one transform."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from inlay.cli.console import err, print_json
from inlay.cli.diff import print_diff

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from inlay.program.program import Program
    from inlay.transforms.pass_manager import Instrument, TransformStep


def steps_up_to(
    name: str | None, files: Sequence[Path], settings: Sequence[str], *, model: str = "", architecture: str = ""
) -> list[TransformStep]:
    """Return the configured transforms up to `name`, which runs even if it is disabled by default; None for all.

    An external pass (`package.module:callable`) runs alone, on the captured program.
    """
    from inlay.config import resolve_config
    from inlay.errors import UsageError
    from inlay.integrations.external_pass import is_external, load_external_pass
    from inlay.transforms import configure, steps_through
    from inlay.transforms.pass_manager import TransformStep

    if name is not None and is_external(name):
        if files or settings:
            raise UsageError(
                f"--config and --set apply to Inlay's transforms only, and {name} is an external pass.", "Omit them."
            )
        return [TransformStep(name, load_external_pass(name))]
    steps = configure(resolve_config(architecture=architecture, model=model, files=files, settings=settings))
    return steps if name is None else steps_through(name, steps)


def show_pass(program: Program, steps: list[TransformStep], dump_to: Path | None, *, full: bool, as_json: bool) -> None:
    """Run the steps; print the changes, the summary and the misses of the last one."""
    from inlay.program.text.diff import diff
    from inlay.program.text.printer import dump
    from inlay.transforms import run
    from inlay.transforms.instruments import TransformSnapshot, dump_instruments

    around = TransformSnapshot(steps[-1].key)
    instruments: list[Instrument] = [around, *dump_instruments(dump_to)]
    _, records = run(program, steps, instruments)
    record = records[-1]
    assert around.pair is not None
    if as_json:
        print_json([each.to_json() for each in records])
    elif full:
        for title, made in zip(("before", "after"), around.pair, strict=True):
            typer.echo(f"# ---- {title} {record.key}")
            typer.echo(dump(made), nl=False)
    else:
        print_diff(diff(*around.pair))
    for each in records:
        err.print(each.summary, markup=False, soft_wrap=True)
    for remark in record.notes:
        err.print(f"  {remark.reason}", markup=False, soft_wrap=True)
    for remark in sorted(record.misses, key=lambda each: -each.matched_nodes / max(each.pattern_nodes, 1))[:5]:
        where = f" ({remark.source})" if remark.source else ""
        matched = f"{remark.matched_nodes} of {remark.pattern_nodes}"
        text = f"  {remark.kind.value} {remark.nodes[0]}: {matched}: {remark.reason}{where}"
        err.print(text, markup=False, soft_wrap=True)
    if len(record.misses) > 5:
        err.print(f"  … and {len(record.misses) - 5} more misses (--json lists them)")
