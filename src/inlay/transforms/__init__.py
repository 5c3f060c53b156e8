"""Transforms: registered by name, configured by YAML, run by a small pass manager."""

from inlay.transforms.base import (
    Case,
    LocalTransform,
    Numerics,
    PatternTransform,
    ProgramTransform,
    Stage,
    Transform,
    TransformOptions,
    TransformResult,
    registry,
    transform,
)
from inlay.transforms.pass_manager import TransformRecord, configure, run, steps_through

__all__ = [
    "Case",
    "LocalTransform",
    "Numerics",
    "PatternTransform",
    "ProgramTransform",
    "Stage",
    "Transform",
    "TransformOptions",
    "TransformRecord",
    "TransformResult",
    "configure",
    "registry",
    "run",
    "steps_through",
    "transform",
]
