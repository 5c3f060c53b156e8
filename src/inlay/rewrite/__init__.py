"""Pattern → site → near miss → replacement."""

from inlay.rewrite.engine import Outcome, rewrite
from inlay.rewrite.rule import Miss, Rule, Site

__all__ = ["Miss", "Outcome", "Rule", "Site", "rewrite"]
