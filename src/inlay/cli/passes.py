"""`inlay passes` and `inlay config`"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from inlay import derived_cache
from inlay.cli.console import err, make_table, out, print_json

ConfigOption = Annotated[
    list[Path] | None,
    typer.Option("--config", metavar="FILE", help="YAML file with transform options. May be given several times."),
]
BUILD_TRANSFORMS = ("insert_kv_cache", "pack_weights")
"""Transforms that `inlay.flow` enables for language models."""
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set an option of a transform: fuse_gemms.enabled=false. May be given several times.",
    ),
]


def passes(as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False) -> None:
    """List all transforms (Inlay's graph passes), in the order in which a build runs them.

    Example: [bold]inlay passes[/]
    """
    rows = list_transforms()
    if as_json:
        print_json(rows)
        return
    table = make_table("transform", "stage", "default", "numerics", "summary", fold=True)
    for row in rows:
        default = "on" if row["enabled"] else "build" if row["name"] in BUILD_TRANSFORMS else "off"
        table.add_row(row["name"], row["stage"], default, row["numerics"], row["summary"])
    out.print(table)
    out.print("\nbuild: off by default; `inlay build` enables it for language models.", markup=False)
    out.print("numerics: exact = same bits; rounding = rounding may change; approximate = values change.", markup=False)


def list_transforms() -> list[dict[str, Any]]:
    """Return the row of every transform. Without transforms of other packages, later calls need not import torch."""
    installed = entry_points(group="inlay.transforms")
    held: list[dict[str, Any]] | None = None if installed else derived_cache.read("transforms")
    if held is not None:
        return held
    from inlay.config import resolve_config
    from inlay.transforms import configure, registry

    steps = configure(resolve_config())
    used = {step.transform.name for step in steps}
    listed = [(type(step.transform), bool(step.transform.options.enabled)) for step in steps]
    listed += [(cls, False) for name, cls in registry().items() if name not in used]
    rows = [
        {
            "name": cls.name,
            "stage": cls.stage.value,
            "enabled": enabled,
            "numerics": cls.numerics.value,
            "summary": cls.summary(),
        }
        for cls, enabled in listed
    ]
    if not installed and all(cls.__module__.startswith("inlay.") for cls, _ in listed):
        derived_cache.write("transforms", rows)
    return rows


def config(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model or architecture whose overlays apply.")] = "",
    files: ConfigOption = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False,
) -> None:
    """Print the resolved configuration and the origin of each value.

    Example: [bold]inlay config --set match_rope.enabled=false[/]

    Example: [bold]inlay config ./SmolLM2-135M[/]
    """
    from inlay.config import resolve_config
    from inlay.insight.report.tables import settings_table
    from inlay.transforms import configure

    name, architecture = _identity(model)
    resolved = resolve_config(architecture=architecture, model=name, files=files or (), settings=settings or ())
    rows = settings_table(resolved, configure(resolved))
    columns = "transform", "option", "value", "from"
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    table = make_table(*columns, fold=True)
    for key, name, value, origin in rows:
        table.add_row(key, name, Text(repr(value)), Text(origin))
    out.print(table)


def _identity(model: str) -> tuple[str, str]:
    """Return name and architecture of MODEL, as in its program. A single word is an architecture."""
    if not model or (model.replace("-", "_").isidentifier() and not Path(model).exists()):
        return model, model
    from inlay.frontend import identify

    found = identify(model)
    if not found.architecture:
        text = f"The architecture of {found.name} is unknown. Only overlays for its name apply."
        err.print(text, markup=False, soft_wrap=True)
    return found.name, found.architecture
