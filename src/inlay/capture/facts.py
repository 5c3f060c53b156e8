"""Model facts from what was captured and from what the configuration says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from inlay.program.facts import Facts, agree
from inlay.program.fold import fold
from inlay.program.graphs import all_nodes

if TYPE_CHECKING:
    from inlay.capture.model import Model
    from inlay.program.program import Program

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def find_facts(program: Program, model: Model) -> Program:
    """The program with its facts: counted in the graph where it shows them, read from the configuration otherwise."""
    graph: dict[str, int] = {}
    folds = fold(program)
    if folds.kinds:
        graph["layers"] = folds.layers
    attention = next((node for node in all_nodes(program.graph) if node.target is _ATTENTION), None)
    if attention is not None:
        query: Any = attention.args[0]
        shape = query.meta["val"].shape
        if len(shape) == 4 and isinstance(shape[1], int) and isinstance(shape[3], int):
            graph["heads"], graph["head_size"] = shape[1], shape[3]
    outs = program.bindings.outs
    if model.config and len(outs) == 1 and isinstance(outs[0].shape[-1], int):
        graph["vocabulary"] = outs[0].shape[-1]
    config = model.config
    names = sorted({*config, *graph})
    facts = Facts(model.architecture, **{name: agree(config.get(name), graph.get(name)) for name in names})
    return replace(program, facts=facts)
