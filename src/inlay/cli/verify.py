"""`inlay verify`"""

from __future__ import annotations

import math
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.console import make_table, out, print_json, progress
from inlay.cli.model_options import CAPTURE_STEPS, DTypeOption, TrustOption, read_program, resolve_config
from inlay.cli.passes import ConfigOption, SetOption  # noqa: TC001 - typer reads the annotations
from inlay.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from inlay.insight.accuracy import AccuracyReport
    from inlay.insight.verify import NumericsVerdict

_STEPS = {**CAPTURE_STEPS, "longest": 4, "reference": 6, "package": 6, "serving": 3, "layers": 1}


def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PACKAGE", help="A package, or a MODEL, which is captured and not built.", show_default=False
        ),
    ],
    text: Annotated[
        Path | None, typer.Option("--text", help="PACKAGE: text file to measure on; by default a built-in sample.")
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", min=0, help="PACKAGE: fail if the mean KL divergence, in nats, is larger than this."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="PACKAGE: number of tokens of the text to measure on.")
    ] = 2048,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", metavar="MODEL", help="PACKAGE: the reference model; needed if it moved, or after refit."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="MODEL: seed of the random inputs.")] = 0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="MODEL: number of random inputs.")] = 4,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="LOCK|PACKAGE", help="MODEL: also compare the number of matches with this."),
    ] = None,
    files: ConfigOption = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
    dtype: DTypeOption = None,
    trust: TrustOption = False,
) -> None:
    """Compare numbers: a package with the model it was built from, or a model before and after each transform.

    PACKAGE: KL divergence and perplexity on a text, in decode, in prefill and with the calls of a server, and the
    relative error after each layer. The reference is the model in float32. Exit code 1 if one of the three mean KL
    divergences is above --max-kl, or if logits are not finite.

    MODEL: the effect of each transform (no change, rounding or wrong) on random inputs. The reference is the captured
    program in float64. Exit code 1 if a result is wrong, has a wrong type, or matches are lost. The transforms are
    those of the default configuration: `insert_kv_cache` and `pack_weights` run only in builds, so check a package.

    Example: [bold]inlay verify ./package --text book.txt --max-kl 0.005[/]

    Example: [bold]inlay verify ./my-model --dtype bfloat16[/]
    """
    from inlay.package_cache import is_package

    if is_package(target):
        given = {"--against": against, "--config": files, "--set": settings, "--dtype": dtype}
        if wrong := [name for name, value in given.items() if value]:
            raise UsageError(f"{', '.join(wrong)} needs a model, and {target} is a package.", "Leave it out.")
        _verify_package(target, text, max_kl, max_tokens, source, as_json, trust)
        return
    if text is not None or max_kl is not None or source is not None:
        raise UsageError("--text, --max-kl and --source need a package.", "Build one with `inlay build`.")
    from inlay.insight.verify import FAILURES, NumericsCheck
    from inlay.transforms import configure, run

    expected = read_expected_sites(against) if against is not None else {}
    program = read_program(target, dtype, trust)
    seen = NumericsCheck(expected, seed, rounds)
    run(program, configure(resolve_config(program, files, settings)), [seen])
    if as_json:
        print_json([verdict.to_json() for verdict in seen.verdicts])
    else:
        _print(seen.verdicts)
    if any(verdict.change in FAILURES for verdict in seen.verdicts):
        raise typer.Exit(int(ExitCode.FAILED))


def _verify_package(
    package: str,
    text: Path | None,
    max_kl: float | None,
    max_tokens: int,
    source: str | None,
    as_json: bool,
    trust: bool,
) -> None:
    with progress(_STEPS) as step:
        from inlay.api import measure_accuracy

        report = measure_accuracy(
            package, text=text, max_tokens=max_tokens, source=source, trust_remote_code=trust, on_step=step
        )
    failed = not math.isfinite(report.kl) or (max_kl is not None and report.kl > max_kl)
    if as_json:
        print_json({**report.to_json(), "max_kl": max_kl, "ok": not failed})
    else:
        _print_accuracy(report)
        if not math.isfinite(report.kl):
            out.print("The logits of the package are not finite.")
        elif max_kl is not None:
            out.print(f"KL divergence {report.kl:.2g} is {'above' if failed else 'within'} the limit of {max_kl:g}.")
    if failed:
        raise typer.Exit(int(ExitCode.FAILED))


def _print_accuracy(report: AccuracyReport) -> None:
    columns = "positions", "mean KL", "max KL", "same top token", "perplexity", "reference"
    table = make_table("", *columns, right=columns)
    for name, row in (("decode", report.decode), ("prefill", report.prefill), ("serving", report.serving)):
        divergence = f"{row.kl_mean:.2e}", f"{row.kl_max:.2e}", f"{row.same_top:.1%}"
        table.add_row(name, str(row.positions), *divergence, f"{row.perplexity:.3f}", f"{row.reference_perplexity:.3f}")
    out.print(table)
    if report.unreached:
        out.print(f"No call reached the code for {' or '.join(report.unreached)}.", markup=False)
    if report.note:
        out.print(report.note)
        return
    out.print("\nrelative error of the hidden state after each layer")
    most = max((each.drift for each in report.layers if math.isfinite(each.drift)), default=0.0) or 1.0
    for each in report.layers:
        bar = "█" * round(30 * each.drift / most) if math.isfinite(each.drift) else "not finite"
        out.print(f"{each.layer:5}  {each.drift:.4f}  {bar}", markup=False)


def read_expected_sites(path: Path) -> dict[str, int]:
    """How often transforms matched when a lock or a package was made."""
    from inlay.transforms.lock import read_lock

    file = path / "current" / "matches.lock" if path.is_dir() else path
    models = read_lock(file).models
    if len(models) != 1:
        raise UsageError(f"{path} is about {len(models)} models.", "Lock this one alone.")
    return {key: each.sites for key, each in models[0].transforms.items()}


def _print(verdicts: list[NumericsVerdict]) -> None:
    errors = "difference", "error before", "error after"
    table = make_table("transform", "sites", "change", *errors, "", right=("sites", *errors), fold=True)
    for each in verdicts:
        numbers = (f"{value:.1e}" if value else "0" for value in (each.difference, each.error_before, each.error_after))
        worst = "; ".join(f"{node.node} {node.error:.1e} ({node.source})" for node in each.worst)
        table.add_row(each.transform, str(each.sites), each.change.value, *numbers, each.reason or worst)
    out.print(table, markup=False)
