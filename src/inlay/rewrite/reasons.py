"""Why a place that starts like a pattern is left alone: a small fixed set of kinds."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The kind of a reason. Beside it stands a text."""

    ANOTHER_CONSUMER = "another consumer"
    DTYPE = "dtype"
    SHAPE = "shape"
    AXIS = "axis"
    CONSTANT = "constant differs"
    MISSING = "missing node"
    EXTRA = "extra node"
    MUTATION = "mutation between"
    OVERLAP = "overlapped by"
    REPLACEMENT = "wrong replacement"
    """What the rule puts in place is of another type than what it replaces: a fault of the rule, not of the place."""
    REFUSED = "refused"
    """A condition of the transform's own."""

    def sentence(self, text: str) -> str:
        """The kind and the text as one sentence.

        >>> Reason.DTYPE.sentence("x is float64"), Reason.OVERLAP.sentence("the match at mul_3")
        ('dtype: x is float64', 'overlapped by the match at mul_3')
        """
        return f"{self.value} {text}" if self is Reason.OVERLAP else f"{self.value}: {text}"

    @classmethod
    def parse(cls, sentence: str) -> tuple[Reason, str]:
        """Kind and text of a sentence that `sentence` made; a remark keeps only the sentence.

        >>> Reason.parse("another consumer: mul_7 is also read by add_3")
        (<Reason.ANOTHER_CONSUMER: 'another consumer'>, 'mul_7 is also read by add_3')
        >>> Reason.parse("too large")
        (<Reason.REFUSED: 'refused'>, 'too large')
        """
        for kind in cls:
            if sentence.startswith(kind.sentence("")):
                return kind, sentence.removeprefix(kind.sentence(""))
        return cls.REFUSED, sentence
