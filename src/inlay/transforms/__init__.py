"""Transforms: registered by name, configured by YAML, run by a small pipeline."""

from inlay.transforms.base import Applied, Case, Numerics, Options, Rewrite, Stage, Transform, registry, transform
from inlay.transforms.foreign import ForeignPass, foreign
from inlay.transforms.pipeline import Record, configure, run, up_to
from inlay.transforms.plain import graph_pass

__all__ = [
    "Applied",
    "Case",
    "ForeignPass",
    "Numerics",
    "Options",
    "Record",
    "Rewrite",
    "Stage",
    "Transform",
    "configure",
    "foreign",
    "graph_pass",
    "registry",
    "run",
    "transform",
    "up_to",
]
