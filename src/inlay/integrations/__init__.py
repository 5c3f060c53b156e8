"""Inlay as a part of other systems, and external passes in Inlay."""

from inlay.integrations.external_pass import ExternalPass, load_external_pass
from inlay.integrations.graph_module_pass import graph_pass
from inlay.integrations.torch_compile import CompiledGraph, inlay

__all__ = ["CompiledGraph", "ExternalPass", "graph_pass", "inlay", "load_external_pass"]
