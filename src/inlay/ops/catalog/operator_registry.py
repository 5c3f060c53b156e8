"""Adapter: all operators that are registered with torch in this process."""

from __future__ import annotations

from collections import defaultdict

import torch

TORCH_NAMESPACES = frozenset(
    {
        *("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_inductor_test", "_native", "_quantized"),
        *("_test", "aten", "c10d", "c10d_functional", "cplib", "debug_mode_ops"),
        *("debugprims", "export", "flex_lib", "fsdp", "inductor", "inductor_prims"),
        *("mkl", "mkldnn", "mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic"),
        *("prims", "profiler", "quantization", "quantized", "quantized_decomposed", "rngprims"),
        *("sparse", "static_runtime", "streams", "symm_mem"),
    }
)
"""Namespaces of torch; every other one belongs to an installed package."""


def operators_by_namespace() -> dict[str, frozenset[str]]:
    """Namespace → names of its operators, without overloads.

    >>> "linear" in operators_by_namespace()["aten"]
    True
    """
    found: dict[str, set[str]] = defaultdict(set)
    for name in torch._C._dispatch_get_all_op_names():
        space, _, operator = name.partition("::")
        found[space].add(operator.partition(".")[0])
    return {space: frozenset(names) for space, names in found.items()}


def is_registered(operator: str) -> bool:
    """Return whether `namespace::name` is registered in this process.

    >>> is_registered("aten::linear"), is_registered("_C::rms_norm")
    (True, False)
    """
    space, _, name = operator.partition("::")
    return name in operators_by_namespace().get(space, ())
