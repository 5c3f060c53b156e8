"""Where passes come from: Inlay, and TensorRT-LLM when it can be imported.

Of TensorRT-LLM's two sets, AutoDeploy's transforms are looked for first and the legacy `compilation` passes second.
Nothing of it is installed here or in CI: what is written down is how its passes are found and called, taken from its
public sources (`BaseTransform.__call__(mod, cm, factory, shared_config)`, `register_add_norm(pass)`,
`remove_copy_for_mutates_args(graph)`); tests/test_passes_generic.py runs this against a stand-in of that shape.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx

from inlay.errors import TransformError
from inlay.integrations.external_pass import ExternalPass
from inlay.transforms import run
from inlay.transforms.pass_manager import TransformStep

if TYPE_CHECKING:
    from inlay.program import Program
    from inlay.transforms import TransformRecord

AUTODEPLOY = "tensorrt_llm._torch.auto_deploy.transform"
LEGACY = "tensorrt_llm._torch.compilation"


def imported(*paths: str) -> list[Any]:
    """The modules, or a skip that lists every import path that was tried and what came of it."""
    modules, failed = [], []
    for path in paths:
        try:
            modules.append(importlib.import_module(path))
        except Exception as error:  # a package for GPUs fails in many ways where there is none
            failed.append(f"{path} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
    if failed:
        pytest.skip(f"not importable: {'; '.join(failed)}")
    return modules


@dataclass
class AutoDeploy:
    """A transform of AutoDeploy's registry as a pass over a GraphModule."""

    name: str
    library: str
    matches: int = 0

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        interface, _ = imported(f"{AUTODEPLOY}.interface", f"{AUTODEPLOY}.library.{self.library}")
        cls = interface.TransformRegistry.get(self.name)
        step = cls.from_kwargs(stage=interface.Stages.PATTERN_MATCHER)
        made: fx.GraphModule = step(gm, None, None, interface.SharedConfig())
        self.matches = made.meta["_autodeploy"]["transform_history"][self.name].num_matches
        return made


class LegacyAddNorm:
    """The residual-add-and-norm patterns of the legacy backend."""

    def __call__(self, gm: fx.GraphModule) -> int:
        from torch._inductor.pattern_matcher import PatternMatcherPass

        (patterns,) = imported(f"{LEGACY}.patterns.residual_add_norm")
        collected = PatternMatcherPass()
        patterns.register_add_norm(collected)
        return int(collected.apply(gm.graph))


class LegacyRemoveCopies:
    """The legacy backend's pass that puts in-place operators back where they were made functional."""

    def __call__(self, gm: fx.GraphModule) -> None:
        (module,) = imported(f"{LEGACY}.remove_copy_pass")
        module.remove_copy_for_mutates_args(gm.graph)


def run_external(program: Program, function: Any) -> tuple[Program, TransformRecord]:
    """Run someone's pass through the pipeline; where it needs a GPU and there is none, that is the expected failure."""
    try:
        result, records = run(program, [TransformStep("external", ExternalPass(function))])
    except TransformError as error:
        if torch.cuda.is_available():
            raise
        pytest.xfail(f"without a GPU: {error}")
    return result, records[0]


def expect_match(record: TransformRecord, why: str) -> None:
    """A recogniser of someone else's that finds nothing in Inlay's programs is an expected failure with a reason."""
    if not record.sites:
        pytest.xfail(f"nothing recognised: {why}")
