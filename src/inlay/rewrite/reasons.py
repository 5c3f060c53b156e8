"""Why a place that starts like a pattern is none: a small fixed set."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Every reason begins with one of these; what does not is a refusal of the rule's own."""

    ANOTHER_CONSUMER = "another consumer"
    DTYPE = "dtype"
    SHAPE = "shape"
    AXIS = "axis"
    CONSTANT = "constant differs"
    MISSING = "missing node"
    EXTRA = "extra node"
    MUTATION = "mutation between"
    OVERLAPPED = "overlapped by"
    REPLACEMENT = "wrong replacement"
    """What the rule puts in place is of another type than what it replaces: a fault of the rule, not of the place."""
    REFUSED = "refused"


def reason_of(text: str) -> Reason:
    """The kind of a reason in words.

    >>> reason_of("another consumer: mul_7 is also read by add_3"), reason_of("too large")
    (<Reason.ANOTHER_CONSUMER: 'another consumer'>, <Reason.REFUSED: 'refused'>)
    """
    return next((kind for kind in Reason if text.startswith(kind.value)), Reason.REFUSED)
