"""Adapter: trace a function of tensors to a graph of ATen operators.

The only file that imports torch's tracer. Composite operators (`linear`, attention) are preserved.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx.experimental.proxy_tensor import make_fx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx


def trace_function(function: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """Return the calls that `function` makes on these values, as a graph with one placeholder for each value.

    >>> import torch
    >>> [node.name for node in trace_function(lambda x: x.relu() + 1, [torch.ones(2)]).graph.nodes]
    ['x_1', 'relu', 'add', 'output']
    """
    module: fx.GraphModule = make_fx(function, pre_dispatch=True)(*values)
    return module
