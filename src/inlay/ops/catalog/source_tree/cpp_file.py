"""Operator registrations in C++ and CUDA files. Comments, macro definitions and other strings are not searched."""

from __future__ import annotations

import re
from bisect import bisect
from typing import TYPE_CHECKING, Any

from inlay.ops.catalog.source_tree.entry import TreeEntry, TreeEntryKind

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMENT_OR_STRING = re.compile(
    r'//[^\n]*|/\*.*?(?:\*/|\Z)|R"([^()\\\s"]{0,16})\((.*?)(?:\)\1"|\Z)'
    r"""|"((?:\\.|[^"\\\n])*+)"?|'(?:\\.|[^'\\\n])*+'?""",
    re.DOTALL,
)
"""Groups 2 and 3 are the content of a string."""
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:\\\n|[^\n])*)", re.MULTILINE)
_LIBRARY = re.compile(
    r"\b((?:STABLE_)?TORCH_LIBRARY(?:_FRAGMENT|_EXPAND)?)\s*"
    r"\(\s*+((?:[^(){};,]|\([^(){};]{0,200}\)){1,200}+),\s*(\w+)\s*\)\s*\{"
)
_EXPORT = re.compile(r"\b(TVM_FFI_DLL_EXPORT_TYPED_FUNC)\s*\(\s*(\w+)\s*,\s*([\w:]+)")
_SCHEMA = re.compile(r"\s*(?:(\w+)::)?(\w+)(?:\.\w+)?\s*(?:\(.*)?", re.DOTALL)
_MACRO = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+|.*\(.*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*(?:[\w:]+\s*\()?")


def read(data: bytes, path: str) -> Iterator[TreeEntry]:
    """Yield the operators that a file registers with torch, and the functions that it exports to TVM's FFI."""
    if b"TORCH_LIBRARY" not in data and b"TVM_FFI_DLL_EXPORT_TYPED_FUNC" not in data:
        return
    source = data.decode("utf-8", "replace").replace("\r\n", "\n")
    text = _COMMENT_OR_STRING.sub(lambda found: _blank(found) if found[0].startswith("/") else found[0], source)
    macros: dict[str, str] = {}
    for name, value in _DEFINE.findall(text):
        is_constant = name not in macros and re.fullmatch(r"\s+\w+\s*", value)
        macros[name] = value.strip() if is_constant else f"{{{name}}}"
    text = _DEFINE.sub(_blank, text)
    code = _COMMENT_OR_STRING.sub(_blank, text)
    lines = [found.start() for found in re.finditer("\n", source)]
    end = 0
    while library := _LIBRARY.search(code, end):
        space = macros.get(library[2].strip(), library[2].strip())
        space = f"{{{space}}}" if _MACRO.fullmatch(space) else space
        end = _end_of_block(code, library.end())
        for call in re.compile(rf"\b{library[3]}\s*\.\s*def\s*\(").finditer(code, library.end(), end):
            schema = _first_string(text, code, call.end())
            found = _SCHEMA.fullmatch(schema)
            name = f"{found[1] or space}::{found[2]}" if found else f"{space}::{{computed}}"
            line = bisect(lines, call.start()) + 1
            yield TreeEntry(TreeEntryKind.OPERATOR, name, library[1], schema, path, line)
    for export in _EXPORT.finditer(code):
        line = bisect(lines, export.start()) + 1
        yield TreeEntry(TreeEntryKind.OPERATOR, export[2], export[1], export[3], path, line)


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def _end_of_block(code: str, start: int) -> int:
    depth = 1
    for brace in re.compile(r"[{}]").finditer(code, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return len(code)


def _first_string(text: str, code: str, start: int) -> str:
    """Return the string literals that are the first argument of a call, joined; empty if it is another expression."""
    opened: Any = _ARGUMENT.match(text, start)
    stop: Any = re.compile(r"\S|\Z").search(code, opened.end())
    strings = _COMMENT_OR_STRING.finditer(text, opened.end(), stop.start())
    return "".join(each[2] or each[3] or "" for each in strings)
