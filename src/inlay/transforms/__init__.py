"""Transforms: registered by name, configured by YAML, run by a small pipeline."""

from inlay.transforms.base import Applied, Case, Numerics, Options, Rewrite, Stage, Transform, registry, transform
from inlay.transforms.pipeline import Record, configure, run, up_to

__all__ = [
    "Applied",
    "Case",
    "Numerics",
    "Options",
    "Record",
    "Rewrite",
    "Stage",
    "Transform",
    "configure",
    "registry",
    "run",
    "transform",
    "up_to",
]
