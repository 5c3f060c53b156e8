"""The report page: one HTML file with JSON data, styles and scripts. It makes no network requests."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from math import isfinite
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_STYLES = ("page.css", "code.css")
_SCRIPTS = ("base.js", "code.js", "transforms.js", "sections.js", "start.js")
MARK = "<!-- Written by Inlay: inlay report -->"
"""Identifies a page written by Inlay, so that other files are not overwritten."""


def render_page(facts: Mapping[str, Any]) -> str:
    """Return the page as HTML text.

    >>> '</script><b>' in render_page({"kind": "model", "title": "</script><b>"})
    False
    """
    data = json.dumps(_replace_nonfinite(facts), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    parts = {
        "MARK": MARK,
        "TITLE": html.escape(str(facts["title"])),
        "STYLES": "\n".join(_asset(name) for name in _STYLES),
        "SCRIPTS": "\n".join(_asset(name) for name in _SCRIPTS),
        # Only `<` can end a script element or start markup in it; JSON can escape it.
        "DATA": data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    }
    return re.sub(r"%%([A-Z]+)%%", lambda found: parts[found[1]], _asset("page.html"))


def write_page(facts: Mapping[str, Any], file: Path) -> int:
    """Write the page and return its size in bytes. A file that Inlay did not write is not overwritten."""
    try:
        if file.exists() and MARK not in file.read_text(errors="replace")[:200]:
            raise UsageError(f"{file} exists and was not written by Inlay.", "Choose another name, or remove it.")
        data = render_page(facts).encode()
        file.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {one_line(error)}.", "Choose another name.") from error
    return len(data)


def _replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities by None, because JSON does not have them.

    >>> _replace_nonfinite({"error": [float("nan"), 1.5]})
    {'error': [None, 1.5]}
    """
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_nonfinite(each) for key, each in value.items()}
    return [_replace_nonfinite(each) for each in value] if isinstance(value, (list, tuple)) else value


def _asset(name: str) -> str:
    return resources.files("inlay.insight.report").joinpath("assets", name).read_text(encoding="utf-8")
