"""Inlay as a contestant: a package, run through ordinary sessions."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from inlay._version import __version__
from inlay.bench.roofline import time_linears, time_weight_read
from inlay.package.loader import load_package
from inlay.runtime.session import Session

if TYPE_CHECKING:
    from inlay.package.loader import LoadedPackage

PREFILL_CHUNK = 512
"""Prompt tokens per step when a cache is filled."""


class PackageContestant:
    """A package as a contestant. Token values do not affect the time. Logits are computed, no token is sampled."""

    version = f"Inlay {__version__}, torch {torch.__version__}"

    def __init__(self, package: LoadedPackage) -> None:
        self._package = package
        self._sessions: dict[int, Session] = {}
        self._session(1).advance([[1]])

    def decode(self, tokens: int, context_tokens: int) -> list[float]:
        """Decode tokens of one sequence, after `context_tokens` others."""
        return self.batch(1, tokens, context_tokens)

    def batch(self, sequences: int, tokens: int, context_tokens: int) -> list[float]:
        """Decode tokens of several sequences in one batch."""
        session = self._session(sequences)
        self._fill(session, context_tokens)
        step = torch.ones(sequences, 1, dtype=torch.int64)
        return [_time(lambda: session.advance(step)) for _ in range(tokens)]

    def prefill(self, tokens: int) -> list[float]:
        """Prefill a prompt, up to its logits."""
        session = self._session(1)
        session.restart()
        prompt = torch.arange(tokens).reshape(1, -1) % self._vocabulary
        return [_time(lambda: session.advance(prompt))]

    def bare(self, rows: int) -> list[float]:
        """Run the linear layers alone, once."""
        return [time_linears(self._package, rows)]

    def read(self) -> list[float]:
        """Read as many bytes as the linear layers read for one token."""
        return [time_weight_read(self._package)]

    @property
    def _vocabulary(self) -> int:
        return max(2, self._package.manifest.facts.get("vocabulary", 2))

    def _session(self, sequences: int) -> Session:
        if sequences not in self._sessions:
            self._sessions[sequences] = Session(self._package, sequences)
        return self._sessions[sequences]

    def _fill(self, session: Session, filled: int) -> None:
        session.restart()
        tokens = torch.arange(filled).expand(session.batch, -1) % self._vocabulary
        for part in torch.split(tokens, max(1, PREFILL_CHUNK // session.batch), dim=1):
            session.advance(part)


def _time(work: Any) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def open_contestant(arguments: dict[str, Any]) -> PackageContestant:
    """Open the contestant for the protocol; it is ready after its first token."""
    torch.set_num_threads(arguments["threads"])
    return PackageContestant(load_package(arguments["package"]))
