"""Spoiled sites of Inductor's own patterns, and of patterns written like vLLM's: the right node and reason first."""

from __future__ import annotations

import pytest

from tests.insight.watch.foreign_sites import foreign_patterns, verdicts


def test_some_sites() -> None:
    assert len(foreign_patterns()) >= 30, "patterns that match their own sites"
    wrong = [str(verdict) for verdict in verdicts("ci", 6) if not verdict.ok]
    assert len(wrong) <= 1, "\n".join(wrong)


@pytest.mark.nightly
def test_two_hundred_sites() -> None:
    wrong = [str(verdict) for verdict in verdicts("nightly", 200) if not verdict.ok]
    assert len(wrong) <= 20, "\n".join(wrong)
