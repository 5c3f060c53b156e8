"""Generate files for a candidate: a transform, its YAML entry, its test, and optionally a Triton kernel."""

from inlay.insight.scaffold.writer import write_scaffold

__all__ = ["write_scaffold"]
