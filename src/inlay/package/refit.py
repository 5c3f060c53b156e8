"""Refit: new weights in a compiled package, through the weight maps of its manifest. Nothing is compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from inlay.errors import UsageError
from inlay.frontend import open_model
from inlay.frontend.huggingface.checkpoint import HFOptions
from inlay.ops import weight_formats as _  # noqa: F401 - registers the weight maps of packed weights
from inlay.package import store, weights_file
from inlay.package.loader import check_package, read_manifest
from inlay.program.weights import InMemoryTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inlay.frontend import SourceModel
    from inlay.package.manifest import Manifest
    from inlay.program.weights import TensorRef


def refit(
    path: str | Path, weights: str, *, output: Path | None = None, on_step: Callable[[str], None] = lambda step: None
) -> Manifest:
    """Write the weights of another checkpoint of the same model into a package, in place or to `output`."""
    manifest, folder = read_manifest(path)
    check_package(manifest, folder)
    on_step("opening the weights")
    model = open_model(weights, HFOptions(_dtype(manifest)))
    tensors = dict(model.tensors) or {
        name: InMemoryTensor(value) for name, value in model.example.module.state_dict().items()
    }
    _check_model(manifest, model, tensors)
    old = weights_file.map_tensors(folder / weights_file.NAME, manifest.weights)
    home = output or Path(path)
    with store.stage_version(home) as staging:
        store.link_files(manifest.files, folder, staging)
        on_step("writing weights")

        def read(name: str) -> torch.Tensor:
            row = manifest.weights[name]
            if not row.sources:
                return old[name]
            return row.derive(tensors).read()

        written = weights_file.write(staging / weights_file.NAME, manifest.weights, read)
        made = replace(manifest, weights_file=written, model=model.name)
        store.publish(home, staging, made.text())
    return made


def _dtype(manifest: Manifest) -> torch.dtype | None:
    """Return the floating-point dtype of the weights that come from the checkpoint."""
    found = [getattr(torch, row.dtype) for row in manifest.weights.values() if row.sources]
    return next((dtype for dtype in found if dtype.is_floating_point), None)


def _check_model(manifest: Manifest, model: SourceModel, tensors: Mapping[str, TensorRef]) -> None:
    if manifest.architecture and model.architecture and manifest.architecture != model.architecture:
        raise UsageError(
            f"{model.name} has the architecture {model.architecture}, but the package has {manifest.architecture}.",
            "Refit with a checkpoint of the same model, or build a new package.",
        )
    for each in ("pooling", "normalized"):  # the code of the package contains them
        old, new = getattr(manifest.encoder, each, None), getattr(model.encoder, each, None)
        if old != new:
            raise UsageError(
                f"{model.name} has {each} = {new}, but the package was built for {old}.",
                "Refit with a checkpoint of the same model, or build a new package.",
            )
    for name, row in manifest.weights.items():
        missing = [source for source in row.sources if source not in tensors]
        if missing:
            raise UsageError(f"{model.name} has no tensor {missing[0]}, from which {name} is derived.")
        row.derive(tensors).readers()
    facts = [(name, model.config_facts.get(name), value) for name, value in manifest.facts.items()]
    differing = [
        (name, new, old) for name, new, old in facts if new is not None and new != old and name != "max_length"
    ]
    if differing:
        name, new, old = differing[0]
        raise UsageError(
            f"{model.name} has {new:,} {name.replace('_', ' ')}, but the package was built for {old:,}.",
            "Refit with a checkpoint of the same model, or build a new package.",
        )
