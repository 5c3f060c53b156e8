"""`post_grad_graphs`: what Inductor makes code of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import UsageError
from inlay.testing.compiler import disable_caches, record_post_grad_graphs
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
    """The graphs that Inductor lowers when the model is called: functional ATen, after the last post-grad pass.

    One graph a piece, in the order they are compiled; a backward pass is another one, if the model calls it. The caches
    are off and the compiler is reset, so that everything is compiled.

    >>> (graph,) = post_grad_graphs(lambda x: x @ x, torch.ones(2, 2))
    >>> [str(node.target) for node in graph.nodes if node.op == "call_function"]
    ['aten.mm.default']
    """
    torch.compiler.reset()
    with disable_caches(), record_post_grad_graphs() as made:
        call(compile_model(copy_model(model), backend, options, dynamic), copy_inputs(inputs))
    if not made:
        raise UsageError("No graph reached Inductor.", "Is it below the backend, and is torch.compile on?")
    return made
