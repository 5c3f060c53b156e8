"""Where passes come from: Inlay, and TensorRT-LLM when it can be imported.

Of TensorRT-LLM's two sets, AutoDeploy's transforms are looked for first and the legacy `compilation` passes second, by
`inlay.integrations.tensorrt_llm`. Nothing of it is installed here or in CI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import TransformError, UsageError
from inlay.integrations.external_pass import ExternalPass
from inlay.integrations.tensorrt_llm import find_autodeploy_pass
from inlay.transforms import run
from inlay.transforms.pass_manager import TransformStep

if TYPE_CHECKING:
    from inlay.program import Program
    from inlay.transforms import TransformRecord


def found(name: str) -> Any:
    """The pass of TensorRT-LLM, or a skip that lists every module that was searched."""
    try:
        return find_autodeploy_pass(f"autodeploy:{name}")
    except UsageError as error:
        pytest.skip(str(error))


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
