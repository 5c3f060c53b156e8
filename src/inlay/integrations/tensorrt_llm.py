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

    def __init__(self, name: str, transform: Any, interface: Any) -> None:
        self.name, self.matched_count, self.skip_reason = name, 0, ""
        try:
            config = {"stage": interface.Stages.PATTERN_MATCHER, **_default_config(name), "enabled": True}
            self.transform, self.shared_config = transform.from_kwargs(**config), interface.SharedConfig()
        except Exception as error:
            problem = f"{PREFIX}{name} cannot be created: {type(error).__name__}: {one_line(error)}."
            raise UsageError(problem, "Inlay gives it the options of AutoDeploy's default configuration.") from error

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


def find_autodeploy_pass(text: str) -> Callable[[Any], Any]:
    """Return the pass for `autodeploy:NAME`; the error lists every module that was searched.

    >>> find_autodeploy_pass("autodeploy:fuse_rmsnorm")
    Traceback (most recent call last):
    ...
    inlay.errors.UsageError: TensorRT-LLM has no pass fuse_rmsnorm that can be imported. Searched:
      tensorrt_llm._torch.auto_deploy.transform.interface (ModuleNotFoundError: No module named 'tensorrt_llm')
    Install TensorRT-LLM, or put its checkout on PYTHONPATH.
    """
    name, failures = text.removeprefix(PREFIX), list[str]()

    def find(path: str, attribute: str) -> Any:
        try:
            return getattr(importlib.import_module(path), attribute)
        except Exception as error:  # a package for GPUs fails in many ways where there is none
            failures.append(f"{path} ({type(error).__name__}: {one_line(error)})")
            return None

    interface = f"{AUTODEPLOY}.transform.interface"
    registered = find(interface, "TransformRegistry")
    if registered and find(f"{AUTODEPLOY}.transform.library", "__name__"):
        if registered.has(name):
            return AutoDeployPass(name, registered.get(name), importlib.import_module(interface))
        failures.append(f"{AUTODEPLOY}.transform.library (registers no {name})")
    found = find(_LEGACY_PASSES[name], name) if name in _LEGACY_PASSES else None
    if found:
        return partial(apply_registered, found) if name.startswith("register_") else found
    known = {*_LEGACY_PASSES, *getattr(registered, "_registry", ())} - {name}
    install = "" if registered else "Install TensorRT-LLM, or put its checkout on PYTHONPATH."
    tried = "\n  ".join(failures)
    raise UsageError(
        f"TensorRT-LLM has no pass {name} that can be imported. Searched:\n  {tried}\n{suggest(name, known) or install}"
    )


def _default_config(name: str) -> dict[str, Any]:
    """Return the options of a transform in AutoDeploy's own default configuration, if that can be read."""
    try:
        text = resources.files(f"{AUTODEPLOY}.config").joinpath("default.yaml").read_text()
        return dict(yaml.safe_load(text)["transforms"].get(name) or {})
    except (ImportError, OSError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return {}
