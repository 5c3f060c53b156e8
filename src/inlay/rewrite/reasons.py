"""The kinds of reasons why a site is left alone: a small fixed set."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The kind of a reason. A text with details follows it."""

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
    """The replacement has another type than the matched value: an error in the rule, not in the program."""
    REFUSED = "refused"
    """A condition that is specific to the transform does not hold."""

    def sentence(self, text: str) -> str:
        """Return the kind and the text as one sentence.

        >>> Reason.DTYPE.sentence("x is float64"), Reason.OVERLAP.sentence("the match at mul_3")
        ('dtype: x is float64', 'overlapped by the match at mul_3')
        """
        return f"{self.value} {text}" if self is Reason.OVERLAP else f"{self.value}: {text}"

    @classmethod
    def parse(cls, sentence: str) -> tuple[Reason, str]:
        """Return the kind and text of a sentence that `sentence` made; remarks store only the sentence.

        >>> Reason.parse("another consumer: mul_7 is also read by add_3")
        (<Reason.ANOTHER_CONSUMER: 'another consumer'>, 'mul_7 is also read by add_3')
        >>> Reason.parse("too large")
        (<Reason.REFUSED: 'refused'>, 'too large')
        """
        for kind in cls:
            if sentence.startswith(kind.sentence("")):
                return kind, sentence.removeprefix(kind.sentence(""))
        return cls.REFUSED, sentence
