"""Candidates for fusion: found by structure, ordered by what they could save, looked up before anything is written."""

from inlay.insight.candidates.advice import Recommendation
from inlay.insight.candidates.candidate import SIZES, Candidate, Search, find_candidates, ranked

__all__ = ["SIZES", "Candidate", "Recommendation", "Search", "find_candidates", "ranked"]
