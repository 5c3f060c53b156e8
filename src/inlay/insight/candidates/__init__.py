"""Fusion candidates: found by structure, ranked, and looked up in the kernel catalog."""

from inlay.insight.candidates.advice import Recommendation
from inlay.insight.candidates.candidate import SIZES_TEXT, Candidate, CandidateSearch, find_candidates, searched_text

__all__ = ["SIZES_TEXT", "Candidate", "CandidateSearch", "Recommendation", "find_candidates", "searched_text"]
