"""The review of a fusion, evaluated: a checklist with evidence, and the note that ends it."""

from inlay.testing.review.checklist import ChecklistItem, Review, review

__all__ = ["ChecklistItem", "Review", "review"]
