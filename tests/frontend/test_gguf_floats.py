"""GGUF files of 16-bit floats: exact, and not larger in a package than in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch

from inlay.flow import BuildOptions, build
from inlay.frontend import open_model
from inlay.ops.weight_layout import Packing
from inlay.package import weights_file
from inlay.package.loader import read_manifest
from tests.models import copy_metadata, finish_gguf, tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

FLOAT32: Any = dict.fromkeys(
    ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "F32"
)
NORM = "blk.0.attn_norm.weight"


def _file(folder: Path, kind: str, change: Callable[[str, Any], Any] = lambda name, values: values) -> Path:
    """A Llama whose matrices are stored as `kind`, and its norms in F32; `change` makes the values."""
    path = folder / f"{kind}.gguf"
    reader = gguf.GGUFReader(tiny_gguf(folder / "float32.gguf", **FLOAT32))
    wanted = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    copy_metadata(reader, writer)
    for tensor in reader.tensors:
        values = change(tensor.name, np.array(tensor.data))
        if values.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    finish_gguf(writer)
    return path


def _bfloat16(name: str, values: Any) -> Any:
    return torch.from_numpy(values).bfloat16().float().numpy()


def _bfloat16_matrices(name: str, values: Any) -> Any:
    return _bfloat16(name, values) if values.ndim == 2 else values


def _dtype(path: Path) -> torch.dtype:
    (dtype,) = {value.dtype for value in open_model(str(path)).example.module.parameters()}
    return dtype


def _exact(path: Path) -> dict[str, Tensor]:
    from inlay.frontend.huggingface.checkpoint import HFOptions

    return {name: ref.read() for name, ref in open_model(str(path), HFOptions(torch.float32)).tensors.items()}


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_values_of_a_bfloat16_checkpoint_stay_bfloat16(tmp_path: Path, kind: str) -> None:
    path = _file(tmp_path, kind, _bfloat16)
    assert _dtype(path) is torch.bfloat16
    wanted = _exact(path)
    for name, ref in open_model(str(path)).tensors.items():
        assert torch.equal(ref.read().float(), wanted[name])


@pytest.mark.fast
def test_values_that_need_more_bits_stay_float32(tmp_path: Path) -> None:
    assert _dtype(_file(tmp_path, "F16")) is torch.float32, "a matrix has 11 bits"
    assert _dtype(_file(tmp_path, "BF16", _bfloat16_matrices)) is torch.float32, "a norm has 24 bits"
    assert _dtype(_file(tmp_path, "F32", _bfloat16)) is torch.float32, "the file has 32 bits"


@pytest.mark.fast
def test_small_values_of_f16_are_bfloat16(tmp_path: Path) -> None:
    """F16 rounds small values of bfloat16 to fewer bits."""
    path = _file(tmp_path, "F16", lambda name, values: _bfloat16(name, values * 1e-4))
    assert _dtype(path) is torch.bfloat16


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_package_is_as_large_as_the_file(tmp_path: Path, kind: str) -> None:
    path = _file(tmp_path, kind, _bfloat16)
    build(str(path), tmp_path / "package", BuildOptions(max_length=32, max_batch=1, use_cache=False))
    manifest, folder = read_manifest(tmp_path / "package")
    held = weights_file.map_tensors(folder / weights_file.NAME, manifest.weights)
    wanted = _exact(path)
    packed = 0
    for name, row in manifest.weights.items():
        if row.sources:
            values = torch.cat([wanted[source] for source in row.sources])
            packed += row.map.endswith("pack:bfloat16")
            is_packed = row.map.endswith("pack:bfloat16")
            found = Packing(16, 0).unpack(held[name], len(values)) if is_packed else held[name].float()
            assert torch.equal(found, values), name
    assert packed == 9, "the head, and four weights of each layer"
    tensors = gguf.GGUFReader(path).tensors
    assert manifest.weights_file.size <= sum(tensor.n_bytes for tensor in tensors) + 8192


@pytest.mark.nightly
def test_float16_on_request(tmp_path: Path) -> None:
    """Two bytes for each value, also where bfloat16 would round."""
    path = _file(tmp_path, "F16")
    build(str(path), tmp_path / "package", BuildOptions(weights="float16", max_length=32, max_batch=1, use_cache=False))
    manifest, folder = read_manifest(tmp_path / "package")
    held = weights_file.map_tensors(folder / weights_file.NAME, manifest.weights)
    wanted = _exact(path)
    for name, row in manifest.weights.items():
        if row.sources and len(row.shape) == 2:
            assert held[name].dtype is torch.float16
            assert torch.equal(held[name].float(), torch.cat([wanted[source] for source in row.sources])), name
