"""Review of a fusion: an evaluated checklist with evidence, and an iteration note."""

from inlay.testing.review.checklist import ChecklistItem, Review, review

__all__ = ["ChecklistItem", "Review", "review"]
