"""`inlay prove`"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.console import make_table, out, print_json
from inlay.cli.inspect import PackageArgument  # noqa: TC001 - typer reads the annotation
from inlay.errors import ExitCode

if TYPE_CHECKING:
    from inlay.package.copy_proof import Proof, StateProof


def prove(
    package: PackageArgument,
    longer: Annotated[
        Path | None,
        typer.Option("--longer", help="Package of the same model with a larger --max-length, for comparison."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
) -> None:
    """Prove that a package updates its state in place. Exit code 1: not proven.

    The memory traffic of a step must not grow with the number of filled rows, except for the rows that attention reads.
    Every kernel or call that accesses a state is listed with the bytes it reads and writes, and compared with the
    generated source. Then steps run on empty, half-full and full caches; page accesses and allocations are recorded.

    Example: [bold]inlay prove ./smollm2[/]
    """
    from inlay.package.copy_proof import prove
    from inlay.package.loader import load_package

    proof = prove(load_package(package), load_package(longer) if longer else None)
    if as_json:
        print_json(proof.to_json())
    else:
        _print(proof)
    if not proof.holds:
        raise typer.Exit(int(ExitCode.FAILED))


def _print(proof: Proof) -> None:
    numbers = "bytes", "written per step", "pages read", "pages written", "copied"
    table = make_table("state", *numbers, "accessed by", right=numbers, fold=True)
    groups: dict[tuple[int, int, int, str], list[StateProof]] = {}
    for state in proof.states:
        lines = "\n".join(dict.fromkeys(_format_access(each) for each in state.accesses))
        groups.setdefault((state.bytes, state.bytes_written, state.bytes_copied, lines), []).append(state)
    for (*_, lines), states in groups.items():
        first, last = states[0], states[-1]
        table.add_row(
            first.name if len(states) == 1 else f"{first.name} … {last.name} (× {len(states)})",
            f"{first.bytes:,}",
            f"{first.bytes_written:,}",
            str(max(each.pages_read for each in states)),
            str(max(each.pages_written for each in states)),
            f"{first.bytes_copied:,}",
            lines,
        )
    out.print(table, markup=False)
    for problem in proof.problems[:20]:
        out.print(f"not proven: {problem}", markup=False)
    copied = sum(state.bytes_copied for state in proof.states)
    if proof.holds and not proof.states:
        out.print("The package has no state.")
    elif proof.holds:
        out.print(f"\nProven: {len(proof.states)} states are written in place, 0 bytes are copied.")
        out.print(_format_measurement(proof))
    else:
        out.print(f"\nNot proven: {copied:,} bytes copied per step, {len(proof.problems)} problems.")


def _format_measurement(proof: Proof) -> str:
    allocated = (
        "allocations not measured (this needs glibc)"
        if proof.allocated_bytes is None
        else f"at most {proof.allocated_bytes:,} bytes allocated"
    )
    if not any(proof.cache_lengths):
        return f"Measured: {proof.steps} steps, {allocated}."
    rooms = " and ".join(f"{room:,}" for room in proof.cache_lengths)
    more = "" if len(proof.cache_lengths) > 1 else ". Use --longer PACKAGE to compare with another length"
    return (
        f"Measured: {proof.steps} steps on empty, half-full and full caches of {rooms} rows. Only filled and"
        f" new rows are accessed; {allocated}, independent of how full a cache is{more}."
    )


def _format_access(access: dict[str, str]) -> str:
    """Format one access: the relevant operator of the kernel and its accesses."""
    by = access["kernel"]
    names = by.removeprefix("kernel(").removesuffix(")").split(", ")
    known = [name for name in names if "put" in name or "copy" in name or "scatter" in name or "clone" in name]
    does = [f"{what} {access[what]}" for what in ("reads", "writes", "copies") if what in access]
    return f"{(known or names)[0].removesuffix('.default')}: {', '.join(does)}"
