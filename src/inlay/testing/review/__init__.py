"""The review of a fusion, evaluated: a checklist with evidence, and the note that ends it."""

from inlay.testing.review.checklist import Check, Review, review

__all__ = ["Check", "Review", "review"]
