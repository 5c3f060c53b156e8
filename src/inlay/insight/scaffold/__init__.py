"""From a candidate to files: a transform, its YAML entry, its test, and a Triton kernel where nobody has one."""

from inlay.insight.scaffold.writer import write_scaffold

__all__ = ["write_scaffold"]
