"""One file: the facts as JSON, and the styles and scripts that draw them. It asks nobody for anything."""

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
"""How a page is known, so that nothing else is written over."""


def render_page(facts: Mapping[str, Any]) -> str:
    """The page as text.

    >>> '</script><b>' in render_page({"kind": "model", "title": "</script><b>"})
    False
    """
    data = json.dumps(_replace_nonfinite(facts), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    parts = {
        "MARK": MARK,
        "TITLE": html.escape(str(facts["title"])),
        "STYLES": "\n".join(_asset(name) for name in _STYLES),
        "SCRIPTS": "\n".join(_asset(name) for name in _SCRIPTS),
        # In a script element only `<` can end it or begin something else; JSON may write it as a number.
        "DATA": data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    }
    return re.sub(r"%%([A-Z]+)%%", lambda found: parts[found[1]], _asset("page.html"))


def write_page(facts: Mapping[str, Any], file: Path) -> int:
    """Write the page; how many bytes it has. A file that is no page of ours is not written over."""
    try:
        if file.exists() and MARK not in file.read_text(errors="replace")[:200]:
            raise UsageError(f"{file} exists and is no page that Inlay wrote.", "Choose another name, or remove it.")
        data = render_page(facts).encode()
        file.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {one_line(error)}.", "Choose another name.") from error
    return len(data)


def _replace_nonfinite(value: Any) -> Any:
    """JSON has no number that is not finite: there is none instead.

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
