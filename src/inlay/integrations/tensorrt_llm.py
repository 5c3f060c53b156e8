"""Adapter: TensorRT-LLM's passes, named `autodeploy:NAME`.

AutoDeploy's registry is searched first, the passes of the older `compilation` package second. Not run here: it needs a
GPU. The protocol is that of its public sources: `TransformRegistry.get(name)`, `from_kwargs(**config)`, and
`transform(gm, cm, factory, shared_config)`, which returns the module and stores a `TransformInfo` with `num_matches` in
`gm.meta["_autodeploy"]["transform_history"]`. tests/integrations/test_tensorrt_llm.py runs this protocol.
"""

from __future__ import annotations

import importlib
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

from inlay.errors import TransformError, UsageError, one_line, suggest
from inlay.rewrite.pattern_trees import apply_registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

PREFIX = "autodeploy:"
AUTODEPLOY = "tensorrt_llm._torch.auto_deploy"
LEGACY = "tensorrt_llm._torch.compilation"
_LEGACY_PASSES = {
    "register_add_norm": f"{LEGACY}.patterns.residual_add_norm",
    "remove_copy_for_mutates_args": f"{LEGACY}.remove_copy_pass",
    "recover_pass": f"{LEGACY}.recover_pass",
}


class AutoDeployPass:
    """A transform of AutoDeploy as a pass over a GraphModule.

    Inlay has no `CachedSequenceInterface` and no `ModelFactory`, so `cm` and `factory` are None: a transform that uses
    them fails.
    """

    def __init__(self, name: str, transform: Any, shared_config: Any) -> None:
        self.name, self.transform, self.shared_config = name, transform, shared_config
        self.matched_count = 0
        self.skip_reason = ""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Run the transform, and set `matched_count` to its number of matches."""
        try:
            returned = self.transform(gm, None, None, self.shared_config)
        except (AttributeError, TypeError) as error:
            problem = f"{PREFIX}{self.name} failed: {type(error).__name__}: {one_line(error)}."
            remedy = "Inlay passes no `cm` and no `factory`; a transform that needs them runs in AutoDeploy only."
            raise TransformError(problem, remedy) from error
        made, info = returned if isinstance(returned, tuple) else (returned, None)
        info = info or made.meta.get("_autodeploy", {}).get("transform_history", {}).get(self.name)
        if info is None:
            raise TransformError(f"{PREFIX}{self.name} did not report its number of matches.")
        self.matched_count = 0 if info.skipped else int(info.num_matches)
        self.skip_reason = "its TransformInfo says that AutoDeploy skipped it" if info.skipped else ""
        result: fx.GraphModule = made
        return result


def is_autodeploy(text: str) -> bool:
    """Return whether this names a pass of TensorRT-LLM.

    >>> is_autodeploy("autodeploy:fuse_rmsnorm"), is_autodeploy("package.module:callable")
    (True, False)
    """
    return text.startswith(PREFIX)


def find_autodeploy_pass(text: str) -> Callable[[Any], Any]:
    """Return the pass for `autodeploy:NAME`; the error lists every module that was searched.

    >>> find_autodeploy_pass("autodeploy:fuse_rmsnorm")
    Traceback (most recent call last):
    ...
    inlay.errors.UsageError: TensorRT-LLM has no pass fuse_rmsnorm that can be imported. Searched:
      tensorrt_llm._torch.auto_deploy.transform.interface (ModuleNotFoundError: No module named 'tensorrt_llm')
    Install TensorRT-LLM, or put its checkout on PYTHONPATH.
    """
    name, searched = text.removeprefix(PREFIX), Searched()
    interface = searched.module(f"{AUTODEPLOY}.transform.interface")
    library = interface and searched.module(f"{AUTODEPLOY}.transform.library")
    if library:
        registered = interface.TransformRegistry
        if registered.has(name):
            config = {"stage": interface.Stages.PATTERN_MATCHER, **_default_config(name), "enabled": True}
            return AutoDeployPass(name, registered.get(name).from_kwargs(**config), interface.SharedConfig())
        searched.failures.append(f"{AUTODEPLOY}.transform.library (registers no {name})")
    legacy = searched.module(_LEGACY_PASSES[name]) if name in _LEGACY_PASSES else None
    if legacy:
        found = getattr(legacy, name)
        return partial(apply_registered, found) if name.startswith("register_") else found
    known = {*_LEGACY_PASSES, *(getattr(interface.TransformRegistry, "_registry", ()) if library else ())} - {name}
    remedy = suggest(name, known) or "Install TensorRT-LLM, or put its checkout on PYTHONPATH."
    tried = "\n  ".join(searched.failures)
    raise UsageError(f"TensorRT-LLM has no pass {name} that can be imported. Searched:\n  {tried}\n{remedy}")


class Searched:
    """Imports modules, and keeps why the missing ones are missing."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def module(self, path: str) -> Any:
        """Return the module, or None."""
        try:
            return importlib.import_module(path)
        except Exception as error:  # a package for GPUs fails in many ways where there is none
            self.failures.append(f"{path} ({type(error).__name__}: {one_line(error)})")
            return None


def _default_config(name: str) -> dict[str, Any]:
    """Return the options of a transform in AutoDeploy's own default configuration, if that can be read."""
    try:
        text = resources.files(f"{AUTODEPLOY}.config").joinpath("default.yaml").read_text()
        return dict(yaml.safe_load(text)["transforms"].get(name) or {})
    except (ImportError, OSError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return {}
