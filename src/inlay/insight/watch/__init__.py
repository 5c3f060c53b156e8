"""Watch the graph passes of a process, whoever wrote them: matches, near misses and their reasons."""

from inlay.insight.watch.observer import watch_patterns
from inlay.insight.watch.records import PassRecord

__all__ = ["PassRecord", "watch_patterns"]
