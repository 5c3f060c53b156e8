"""Weights in the layouts of quantized checkpoints, packed value by value."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.models import LLAMA, llama_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

MODEL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


@dataclass(frozen=True)
class Integers:
    """`(q - zero) * scale` with random integers; scales and zeros are `[rows, groups]`."""

    q: np.ndarray
    zero: np.ndarray
    scale: np.ndarray
    group: np.ndarray

    @property
    def values(self) -> Tensor:
        steps = self.q.astype(np.float32) - self.zero.astype(np.float32)[:, self.group]
        return torch.from_numpy(steps * self.scale.astype(np.float32)[:, self.group])


def random_integers(
    rng: np.random.Generator, shape: tuple[int, int], bits: int, size: int, *, symmetric: bool, powers: bool = False
) -> Integers:
    """`powers` draws scales whose products with zeros have few bits."""
    rows, columns = shape
    size = columns if size < 0 else size
    groups = columns // size
    zero = np.full((rows, groups), 1 << bits - 1) if symmetric else rng.integers(1, 1 << bits, (rows, groups))
    scale = rng.uniform(0.002, 0.02, (rows, groups)).astype(np.float16)
    if powers:
        scale = (2.0 ** rng.integers(-9, -5, (rows, groups))).astype(np.float16)
    return Integers(rng.integers(0, 1 << bits, shape), zero, scale, np.arange(columns) // size)


def pack_words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack along the last axis; place i of a word has column `order[i]` of its columns."""
    count = 32 // bits
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // count)), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place in range(count):
            column = word * count + (order[place] if order else place)
            if column < columns:
                words[:, word] |= values[:, column].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def gptq(stem: str, held: Integers, bits: int, *, v2: bool = False, order: bool = True) -> dict[str, Tensor]:
    found = {
        f"{stem}.qweight": pack_words(held.q, bits).t().contiguous(),
        f"{stem}.qzeros": pack_words(held.zero.T - (0 if v2 else 1), bits),
        f"{stem}.scales": torch.from_numpy(held.scale.T.copy()),
    }
    return found | ({f"{stem}.g_idx": torch.from_numpy(held.group.astype(np.int32))} if order else {})


def awq(stem: str, held: Integers) -> dict[str, Tensor]:
    return {
        f"{stem}.qweight": pack_words(held.q.T, 4, AWQ_ORDER),
        f"{stem}.qzeros": pack_words(held.zero.T, 4, AWQ_ORDER),
        f"{stem}.scales": torch.from_numpy(held.scale.T.copy()),
    }


def packed(stem: str, held: Integers, bits: int, *, symmetric: bool) -> dict[str, Tensor]:
    """compressed-tensors stores signed integers plus half of their range, so the range starts at 0 again."""
    found = {
        f"{stem}.weight_packed": pack_words(held.q, bits),
        f"{stem}.weight_scale": torch.from_numpy(held.scale),
        f"{stem}.weight_shape": torch.tensor(held.q.shape),
    }
    return found | ({} if symmetric else {f"{stem}.weight_zero_point": pack_words(held.zero.T, bits).t().contiguous()})


def write_checkpoint(
    folder: Path,
    quantization: dict[str, Any],
    store: Callable[[str, tuple[int, int]], tuple[dict[str, Tensor], Tensor]],
) -> dict[str, Tensor]:
    """Write a Llama whose linear layers `store` writes by stem and shape; return the values of all its weights."""
    llama_folder(folder, **MODEL)
    file = folder / "model.safetensors"
    held: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for name, weight in load_file(file).items():
        if "layers" in name and weight.dim() == 2:
            parts, wanted[name] = store(name.removesuffix(".weight"), tuple(weight.shape))
            held |= parts
        else:
            held[name] = wanted[name] = weight
    save_file(held, file)
    (folder / "config.json").write_text(json.dumps(LLAMA | MODEL | {"quantization_config": quantization}))
    return wanted
