"""Transforms, which are registered by name and configured by YAML, and the pass manager that runs them."""

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
