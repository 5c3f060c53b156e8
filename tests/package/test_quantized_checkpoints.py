"""Packages of quantized checkpoints: the stored integers, and the answers of the dequantized model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from inlay.flow import BuildOptions, build
from inlay.ops.weight_formats import FORMATS
from inlay.package.loader import load_package
from inlay.package.refit import refit
from inlay.runtime import Session
from tests.frontend.huggingface.quantized_layouts import MODEL, gptq, packed, random_integers, write_checkpoint
from tests.models import LLAMA, random_model
from tests.small_packages import eager_greedy, greedy

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "pack:Q4_1-g64"),
    "w4a16": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack:Q4_0-g64"),
}
"""What config.json states, and the weight map of the linear layers."""


def _write(folder: Path, kind: str, seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)

    def store(stem: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        held = random_integers(rng, shape, 4, 64, symmetric=kind == "w4a16")
        made = gptq(stem, held, 4) if kind == "gptq" else packed(stem, held, 4, symmetric=True)
        return made, held.values

    return write_checkpoint(folder, KINDS[kind][0], store)


def _check_weights(package: Path, kind: str, wanted: dict[str, Tensor]) -> None:
    loaded = load_package(package)
    kept = FORMATS[KINDS[kind][1].removeprefix("pack:")]
    count = 0
    for name, row in loaded.manifest.weights.items():
        if row.map.endswith(KINDS[kind][1]):
            count += 1
            values = torch.cat([wanted[source] for source in row.sources])
            gap = (kept.packing.unpack(loaded.weights[name], len(values)) - values).abs().max() / values.abs().max()
            assert gap == 0 if kind == "w4a16" else gap < 5e-4, name
    assert count == 8, "four in each layer"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gptq", "w4a16"])
def test_built_from_a_quantized_checkpoint(tmp_path: Path, kind: str) -> None:
    wanted = _write(tmp_path / "model", kind, 0)
    package = tmp_path / "package"
    build(str(tmp_path / "model"), package, BuildOptions(max_length=64, max_batch=2, use_cache=False))
    _check_weights(package, kind, wanted)
    notes = (package / "current" / "remarks.jsonl").read_text()
    if kind == "w4a16":
        assert "Q4_0-g64, kept as stored" in notes
    else:
        assert "Q4_1-g64, integers kept as stored, scales and minima in float16, error 0.0" in notes
    model = random_model(LLAMA | MODEL)
    model.load_state_dict(wanted)
    prompts = torch.arange(2 * 16).reshape(2, 16) * 7 % 64
    found = Session(load_package(package), 2).advance(prompts)
    with torch.no_grad():
        scores = model(prompts).logits[:, -1]
    assert float((found - scores).norm() / scores.norm()) < 0.03, "activations are rounded to 8 bits"
    assert torch.equal(greedy(load_package(package), prompts, 8), eager_greedy(model, prompts, 8))
    other = _write(tmp_path / "other", kind, 1)
    refit(package, str(tmp_path / "other"))
    _check_weights(package, kind, other)
