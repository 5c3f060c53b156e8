"""Names of the parts of split GGUF models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
# The file names that llama-gguf-split gives to parts.


def _match_part(path: Path) -> re.Match[str] | None:
    part = _SPLIT_NAME.match(path.name)
    return part if part and 1 <= int(part["number"]) <= int(part["count"]) else None


def split_parts(path: Path) -> list[Path]:
    """Return the parts of the split model that a file belongs to by its name, in order; else the file alone.

    >>> from pathlib import Path
    >>> [part.name for part in split_parts(Path("m-00002-of-00002.gguf"))], len(split_parts(Path("m.gguf")))
    (['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf'], 1)
    """
    part = _match_part(path)
    if part is None:
        return [path]
    numbers = range(1, int(part["count"]) + 1)
    return [path.with_name(f"{part['stem']}-{number:05}-of-{part['count']}.gguf") for number in numbers]


def split_stem(path: Path) -> str:
    """Return the name of a GGUF model: of the file, without the number of a part.

    >>> from pathlib import Path
    >>> split_stem(Path("m-00002-of-00002.gguf")), split_stem(Path("m.gguf")), split_stem(Path("m-00003-of-00002.gguf"))
    ('m', 'm', 'm-00003-of-00002')
    """
    part = _match_part(path)
    return part["stem"] if part else path.stem
