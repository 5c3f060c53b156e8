"""`inlay cache`"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.console import Command, make_table, out, print_json
from inlay.errors import UsageError
from inlay.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from inlay.build_cache.lookup import Lookup

app = typer.Typer(
    help="List, clear or limit the caches: results of earlier builds, and packages that were built on demand.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.command("ls", cls=Command)
def ls(as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False) -> None:
    """List the entries of the build cache and the packages built by `run`, `chat` and `serve`, recently used first.

    Example: [bold]inlay cache ls[/]
    """
    from inlay.build_cache.store import BuildCache
    from inlay.package_cache import PackageCache

    cache, packages = BuildCache(), PackageCache()
    rows, now, built = cache.listing(), time.time(), packages.entries()
    if as_json:
        listed = [{**vars(each), "folder": str(each.folder)} for each in built]
        print_json({"folder": str(cache.folder), "limit": cache.limit, "entries": rows, "packages": listed})
        return
    columns = "entry", "model", "size", "built", "last used", "hits", "build time"
    table = make_table(*columns, right=("size", "hits", "build time"))
    for row in rows:
        times = [f"{format_duration(now - row[name])} ago" for name in ("created_at", "last_used")]
        numbers = str(row["hits"]), f"{row['build_seconds']:.0f} s"
        table.add_row(row["entry"][:12], row["model"], format_bytes(row["size"]), *times, *numbers)
    if rows:
        out.print(table, markup=False)
    total = sum(row["size"] for row in rows)
    count = "1 entry" if len(rows) == 1 else f"{len(rows)} entries"
    out.print(
        f"{count}, {format_bytes(total)} of at most {format_bytes(cache.limit)}, in {cache.folder}", soft_wrap=True
    )
    if built:
        table = make_table("package of", "size", "last used")
        for each in built:
            table.add_row(each.model, format_bytes(each.size), f"{format_duration(now - each.last_used)} ago")
        out.print()
        out.print(table, markup=False)
        total = format_bytes(sum(each.size for each in built))
        out.print(f"{total} of packages in {packages.folder}", soft_wrap=True)


@app.command("clear", cls=Command)
def clear(
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="Only entries unused for this long: 30m, 12h, 7d, 4w.")
    ] = "0s",
) -> None:
    """Remove entries from the build cache, and packages built by `run`, `chat` and `serve`.

    Packages that `inlay build -o DIR` wrote are not affected.

    Example: [bold]inlay cache clear --older-than 7d[/]
    """
    from inlay import derived_cache
    from inlay.build_cache.store import BuildCache
    from inlay.package_cache import PackageCache

    age = parse_duration(older_than)
    count, freed = BuildCache().clear(age)
    packages, size = PackageCache().clear(time.time() - age)
    size += derived_cache.clear() if not age else 0
    also = f" and {'1 package' if packages == 1 else f'{packages} packages'}" if packages else ""
    out.print(f"Removed {'1 entry' if count == 1 else f'{count} entries'}{also}, {format_bytes(freed + size)}.")


@app.command("limit", cls=Command)
def limit(
    size: Annotated[
        str, typer.Argument(metavar="[SIZE]", help="New maximum size, such as 500MB or 8GB.", show_default=False)
    ] = "",
) -> None:
    """Print the maximum size of the build cache, or set it to SIZE. The least recently used entries are evicted first.

    Example: [bold]inlay cache limit 8GB[/]
    """
    from inlay.build_cache.store import BuildCache

    cache = BuildCache()
    if size:
        cache.limit = parse_bytes(size)
    out.print(f"The limit of the cache is {format_bytes(cache.limit)}.")


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `12h`.

    >>> parse_duration("90s"), parse_duration("12h"), parse_duration("1.5d")
    (90.0, 43200.0, 129600.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if not found:
        raise UsageError(f"{text!r} is not a duration.", "Write 30m, 12h, 7d or 4w.")
    return float(found[1]) * _SPANS[found[2]]


def format_duration(seconds: float) -> str:
    """Format seconds in a readable unit.

    >>> format_duration(5), format_duration(200), format_duration(7200), format_duration(3e5)
    ('5 s', '3 min', '2 h', '3 days')
    """
    for name, size in ((" days", 86400), (" h", 3600), (" min", 60)):
        if seconds >= 2 * size or (size == 60 and seconds >= 60):
            return f"{seconds / size:.0f}{name}"
    return f"{max(seconds, 0):.0f} s"


def print_lookup(found: Lookup, explain: bool) -> None:
    """Print the result of a cache lookup: one line for a hit; the cause of a miss if `explain`."""
    if found.hit:
        more = f" (entry {found.key[:12]}, built {format_duration(found.age)} ago)" if explain else ""
        out.print(f"Cache hit: nothing was compiled, {found.seconds_saved:.0f} s saved{more}.", soft_wrap=True)
        return
    if found.reason and (explain or found.key):
        out.print(f"Cache: {found.reason}", markup=False, soft_wrap=True)
    if not explain or not found.key:
        return
    if not found.nearest:
        out.print("Cache miss: there is no entry to compare with.")
        return
    differing, of = len(found.differences), len(found.factors)
    built = f"{found.nearest_model}, built {format_duration(found.age)} ago"
    text = f"Cache miss. Nearest entry: {found.nearest[:12]} ({built}); {differing} of {of} factors differ:"
    out.print(text, markup=False, soft_wrap=True)
    for each in found.differences:
        out.print(f"  {each.text}", markup=False, soft_wrap=True)
