"""Candidates for fusion: found by structure, ordered by what they could save, looked up before anything is written."""

from inlay.insight.candidates.advice import Recommendation
from inlay.insight.candidates.candidate import SIZES_TEXT, Candidate, CandidateSearch, find_candidates, rank

__all__ = ["SIZES_TEXT", "Candidate", "CandidateSearch", "Recommendation", "find_candidates", "rank"]
