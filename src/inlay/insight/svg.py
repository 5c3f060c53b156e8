"""SVG texts and colors that are readable on light and dark pages."""

from __future__ import annotations

from xml.sax.saxutils import escape

INK, FAINT = "#7a818b", "#7a818b40"
"""Medium gray is readable on both light and dark backgrounds."""
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def header(title: str, description: str, width: float, height: float) -> str:
    """Return the opening element of an SVG image; the caller adds `</svg>`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" role="img" font-family="{FONT}" font-size="12" fill="{INK}">\n'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    )


def text(
    x: float, y: float, words: str, *, size: int = 12, weight: int = 400, anchor: str = "start", colour: str = INK
) -> str:
    """Return a text element at a position."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
        f' fill="{colour}">{escape(words)}</text>'
    )
