"""Pattern rewriting: match a pattern, then refuse the match with a reason or replace it."""

from inlay.rewrite.reasons import Reason
from inlay.rewrite.rewriter import Rewriter
from inlay.rewrite.rule import Match, Refusal, Refused, Rule

__all__ = ["Match", "Reason", "Refusal", "Refused", "Rewriter", "Rule"]
