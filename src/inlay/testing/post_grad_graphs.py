"""`post_grad_graphs`: the graphs that Inductor lowers to code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import UsageError
from inlay.integrations.post_grad import record_post_grad_graphs
from inlay.testing.compiler import disable_caches
from inlay.testing.inputs import call, compile_model, copy_inputs, copy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import fx

    from inlay.testing.inputs import Inputs, Model


def post_grad_graphs(
    model: Model,
    inputs: Inputs,
    *,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[fx.Graph]:
    """Return the graphs that Inductor lowers when the model is called: functional ATen, after the last post-grad pass.

    There is one graph per compiled piece, in compilation order, and one for a backward pass if the model calls it. The
    caches are disabled and the compiler is reset, so that everything is compiled.

    >>> (graph,) = post_grad_graphs(lambda x: x @ x, torch.ones(2, 2))
    >>> [str(node.target) for node in graph.nodes if node.op == "call_function"]
    ['aten.mm.default']
    """
    torch.compiler.reset()
    made: list[fx.Graph] = []
    with disable_caches(), record_post_grad_graphs(made):
        call(compile_model(copy_model(model), backend, options, dynamic), copy_inputs(inputs))
    if not made:
        raise UsageError("No graph reached Inductor.", "Use a backend that calls Inductor, and enable torch.compile.")
    return made
