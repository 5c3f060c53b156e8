"""Damaged quantized checkpoints and split GGUF models: each reads or is refused with a sentence; nothing crashes."""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inlay.errors import InlayError
from inlay.frontend import open_model
from inlay.program.weights import quantized_blocks
from tests.frontend.huggingface.quantized_layouts import awq, gptq, packed, random_integers, write_checkpoint
from tests.frontend.test_split_gguf import split_gguf
from tests.models import tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

PADDING = 32
"""A GGUF file may end with as many bytes that no tensor uses."""
SECONDS_EACH = 20
"""Of this process, whatever else the machine does."""
STATED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "dynamic": {}},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
    "packed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": False}, "format": None}},
        "transform_config": {},
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [64, 64]},
}
VALUES: tuple[Any, ...] = (None, -1, 0, 3, 4.0, True, "x", "4", [], [1], {}, {"x": 1}, {"x": []}, 1 << 70)
DTYPES = (torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8)


def _write(folder: Path, kind: str) -> None:
    rng = np.random.default_rng(0)

    def store(stem: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        held = random_integers(rng, shape, 4, 64, symmetric=False)
        if kind == "fp8":
            scales = torch.ones(-(-shape[0] // 64), -(-shape[1] // 64))
            return {
                f"{stem}.weight": held.values.to(torch.float8_e4m3fn),
                f"{stem}.weight_scale_inv": scales,
            }, held.values
        makers: dict[str, Callable[[], dict[str, Tensor]]] = {
            "gptq": lambda: gptq(stem, held, 4),
            "awq": lambda: awq(stem, held),
            "packed": lambda: packed(stem, held, 4, symmetric=False),
        }
        return makers[kind](), held.values

    write_checkpoint(folder, STATED[kind], store)


def _damage_file(path: Path, rng: random.Random) -> tuple[str, bool]:
    """Truncate a file, or flip a bit, mostly in the header. Returns what was done and whether it must be refused."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        path.write_bytes(data[: (at := rng.randrange(len(data)))])
        return f"{path.name} ends at byte {at} of {len(data)}", at < len(data) - PADDING
    header = 4096 if path.suffix == ".gguf" else 8 + struct.unpack("<Q", data[:8])[0]
    at, bit = rng.randrange(header if rng.random() < 0.8 else len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"{path.name}: bit {bit} of byte {at} flipped", False


def _damage_tensor(path: Path, rng: random.Random) -> tuple[str, bool]:
    """Remove a tensor, or change its dtype, shape or values. Returns what was done and whether it must be refused."""
    held = load_file(path)
    name = rng.choice([key for key in sorted(held) if "layers.0." in key and "proj" in key])
    value = held.pop(name)
    plain = value.float() if value.is_floating_point() else value
    change, dtype = rng.randrange(6), rng.choice(DTYPES)
    new = [
        lambda: None,
        lambda: plain.to(dtype),
        lambda: value[: rng.randrange(len(value) + 1)] if value.dim() else value,
        lambda: value.unsqueeze(rng.randrange(value.dim() + 1)),
        lambda: plain.flip(0).t() if value.dim() == 2 else plain.flip(0),
        lambda: torch.full_like(plain, rng.choice([-1, 0, 1, 127])).to(value.dtype),
    ][change]()
    save_file(held if new is None else held | {name: new.contiguous()}, path)
    return f"{name}: change {change} to {dtype}", new is None


def _damage_config(path: Path, rng: random.Random) -> tuple[str, bool]:
    """Replace one value of the stated quantization, at any depth."""
    config = json.loads(path.read_text())
    inner, where = config["quantization_config"], []
    while True:
        key = rng.choice(sorted(inner))
        where.append(key)
        if not isinstance(inner[key], dict) or not inner[key] or rng.random() < 0.3:
            break
        inner = inner[key]
    inner[key] = rng.choice(VALUES)
    path.write_text(json.dumps(config))
    return f"{'.'.join(where)} is {inner[key]!r}", False


def _check(model: Path, what: str) -> bool:
    """Open a model and read its weights; return whether it was refused."""
    start, sentence = time.process_time(), ""
    try:
        for ref in open_model(str(model)).tensors.values():
            quantized_blocks(ref)
            ref.read()
    except InlayError as error:
        sentence = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert time.process_time() - start < SECONDS_EACH, what
    assert "\n" not in sentence, what
    assert not sentence or sentence.endswith("."), f"{what}: {sentence}"
    return bool(sentence)


def _run(folder: Path, kind: str, count: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    whole = folder / "whole"
    whole.mkdir()
    if kind == "split gguf":
        split_gguf(tiny_gguf(whole / "m.gguf"), 3)
        (whole / "m.gguf").unlink()
    else:
        _write(whole, kind)
    for place in range(count):
        rng, model = random.Random(seed + place), folder / "damaged"
        shutil.copytree(whole, model)
        if kind == "split gguf":
            said, must_refuse = _damage_file(rng.choice(sorted(model.iterdir())), rng)
        else:
            damage = rng.choice([_damage_file, _damage_tensor, _damage_config])
            name = "config.json" if damage is _damage_config else "model.safetensors"
            said, must_refuse = damage(model / name, rng)
        refused = _check(model, f"{kind}, seed {seed + place}: {said}")
        assert refused or not must_refuse, f"{kind}, seed {seed + place}: {said}: a loss is always refused"
        shutil.rmtree(model)
    assert not _check(whole, kind)


KINDS = [*STATED, "split gguf"]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged(tmp_path: Path, kind: str) -> None:
    _run(tmp_path, kind, 12)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged(tmp_path: Path, kind: str) -> None:
    _run(tmp_path, kind, 100)
