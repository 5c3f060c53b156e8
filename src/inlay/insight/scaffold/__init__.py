"""From a candidate to files: a transform, its YAML entry, its test, and a Triton kernel where nobody has one."""

from inlay.insight.scaffold.write import write

__all__ = ["write"]
