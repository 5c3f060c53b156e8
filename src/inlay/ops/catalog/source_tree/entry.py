"""Entries of a source tree, and how their names relate to operations."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from inlay.errors import printable
from inlay.ops.catalog.kernels import BUNDLED_KERNELS, THIRD_PARTY_KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST = 240
_WITHOUT_MEANING = (
    *("and", "cpu", "cuda", "custom", "flashinfer", "forward", "fuse", "fused", "fusion", "fwd", "impl", "kernel"),
    *("match", "op", "pattern", "plugin", "replacement", "search", "torch", "triton", "trtllm", "vllm"),
)


class TreeEntryKind(StrEnum):
    """Kinds of entries."""

    OPERATOR = "operator"
    TRITON = "triton kernel"
    PATTERN = "pattern"


@dataclass(frozen=True)
class TreeEntry:
    """A registration or a kernel in a source file."""

    kind: TreeEntryKind
    name: str
    """As it is used in the tree. A part that is computed is its expression in braces: `{NAMESPACE}::rms_norm`."""
    registered_by: str
    signature: str
    path: str
    line: int

    def __post_init__(self) -> None:
        for name in ("name", "registered_by", "signature", "path"):
            object.__setattr__(self, name, printable(getattr(self, name), _LONGEST))

    @property
    def evidence(self) -> str:
        """Path and line."""
        return f"{self.path}:{self.line}"

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON data."""
        return asdict(self) | {"resolved": "{" not in self.name}


def entries_for(operation: str, entries: Iterable[TreeEntry]) -> list[TreeEntry]:
    """Return the entries whose name has the same words as an operation, or as a kernel of the catalog for it.

    Words about the implementation (`fused`, `kernel`, `triton`, …) do not count. All others must be equal and in the
    same order, so that `rms_norm_fp8_quant` is not found for `rms_norm`. The match is by name: it must be checked.
    """
    kernels = [each for each in (*BUNDLED_KERNELS, *THIRD_PARTY_KERNELS) if operation in each.operations]
    names = [each.evidence.rpartition(":")[2] for each in kernels if each.source not in ("inductor", "onednn", "aten")]
    wanted = frozenset().union(*map(_words, (operation, *names)))
    return [each for each in entries if _words(each.name) & wanted]


@cache
def _words(name: str) -> frozenset[tuple[str, ...]]:
    """Return the words of each part of a name, without the namespace and what is computed.

    >>> _words("_fused_add_rmsnorm_kernel"), sorted(_words("{SPACE}::QkNormRope.search")), _words("x::{self.rope}")
    (frozenset({('add', 'rms', 'norm')}), [('qk', 'norm', 'rope')], frozenset())
    """
    known = re.sub(r"\{(?:.*\}|.*)", "{", name).rpartition("::")[2]
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", known).lower()
    spaced = re.sub(r"(?<=rms|yer)norm", "_norm", spaced)
    parts = [re.findall(r"[a-z0-9]+", part) for part in spaced.split(".") if "{" not in part]
    return frozenset(tuple(each for each in words if each not in _WITHOUT_MEANING) for words in parts) - {()}
