"""Quantized checkpoints: their integers, scales and zeros are read bit for bit, whatever the layout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inlay.errors import ModelError
from inlay.frontend import open_model
from inlay.program.weights import quantized_blocks
from tests.frontend.huggingface.quantized_layouts import (
    E2M1,
    MODEL,
    awq,
    gptq,
    packed,
    random_integers,
    write_checkpoint,
)
from tests.models import config_folder

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.fast

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
PACKED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def _write(
    folder: Path,
    layout: str,
    *,
    bits: int = 4,
    size: int = 64,
    symmetric: bool = False,
    powers: bool = False,
    **more: Any,
) -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    stated = {"gptq": GPTQ, "awq": AWQ, "packed": PACKED}[layout] | {"bits": bits, "group_size": size} | more
    stated[stated.pop("bits_name", "bits")] = stated.pop("bits")

    def store(stem: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        held = random_integers(rng, shape, bits, size, symmetric=symmetric, powers=powers)
        if layout == "gptq":
            v2 = more.get("checkpoint_format") == "gptq_v2"
            return gptq(stem, held, bits, v2=v2, order=size != 32), held.values
        made = awq(stem, held) if layout == "awq" else packed(stem, held, bits, symmetric=symmetric)
        return made, held.values

    return write_checkpoint(folder, stated, store)


def _block_values(ref: Any) -> Tensor:
    blocks = quantized_blocks(ref)
    assert blocks is not None
    if "-g" in blocks.format:
        return _wide_block_values(blocks.read().numpy(), *blocks.format.split("-g"))
    return torch.from_numpy(gguf.dequantize(blocks.read().numpy(), gguf.GGMLQuantizationType[blocks.format]))


def _wide_block_values(rows: Any, name: str, width: str) -> Tensor:
    """As gguf, for blocks of more columns."""
    size, factors = int(width), 1 + (name == "Q4_1")
    blocks = rows.reshape(len(rows), -1, 2 * factors + size // 2)
    held = blocks[:, :, : 2 * factors].copy().view(np.float16).astype(np.float32)
    q = np.concatenate([blocks[:, :, 2 * factors :] & 15, blocks[:, :, 2 * factors :] >> 4], 2).astype(np.float32)
    values = q * held[:, :, :1] + held[:, :, 1:] if factors == 2 else (q - 8) * held
    return torch.from_numpy(values.reshape(len(rows), -1))


CASES: dict[str, dict[str, Any]] = {
    "gptq": {"layout": "gptq"},
    "gptq, groups of 32": {"layout": "gptq", "size": 32},
    "gptq, groups of 128": {"layout": "gptq", "size": 128},
    "gptq, one group": {"layout": "gptq", "size": -1, "symmetric": True},
    "gptq, symmetric": {"layout": "gptq", "symmetric": True},
    "gptq v2": {"layout": "gptq", "checkpoint_format": "gptq_v2"},
    "gptq, 8 bits": {"layout": "gptq", "bits": 8, "symmetric": True},
    "gptq, 8 bits, asymmetric": {"layout": "gptq", "bits": 8},
    "gptq, 2 bits": {"layout": "gptq", "bits": 2},
    "gptq, bits by their other name": {"layout": "gptq", "bits_name": "w_bit"},
    "gptq, exact minima": {"layout": "gptq", "powers": True},
    "awq": {"layout": "awq"},
    "awq, symmetric": {"layout": "awq", "symmetric": True},
    "w4a16": {"layout": "packed", "symmetric": True},
    "w4a16, asymmetric": {"layout": "packed"},
    "w4a16, channels": {"layout": "packed", "size": -1, "symmetric": True},
    "w8a16": {"layout": "packed", "bits": 8, "symmetric": True},
}
FORMATS: dict[str, str | None] = {
    "gptq, 8 bits": "Q8_0",
    "gptq, 8 bits, asymmetric": None,
    "gptq, 2 bits": "Q4_0",
    "w8a16": "Q8_0",
    **dict.fromkeys(("gptq, one group", "gptq, symmetric", "awq, symmetric", "w4a16", "w4a16, channels"), "Q4_0"),
}
"""The block format that the integers have; Q4_1 unless stated. Those of four bits are as wide as the groups."""
EXACT = {*FORMATS, "gptq, exact minima"}


@pytest.mark.parametrize("case", CASES)
def test_integers(tmp_path: Path, case: str) -> None:
    wanted = _write(tmp_path, **CASES[case])
    tensors = open_model(str(tmp_path)).tensors
    name = "model.layers.1.mlp.down_proj.weight"
    for key, values in wanted.items():
        assert torch.equal(tensors[key].read(), values), key
    blocks = quantized_blocks(tensors[name])
    kept, size = FORMATS.get(case, "Q4_1"), CASES[case].get("size", 64)
    width = {32: "", 64: "-g64"}.get(size, "-g128")
    assert (blocks and blocks.format) == (f"{kept}{width}" if kept in ("Q4_0", "Q4_1") else kept)
    if blocks:
        gap = (_block_values(tensors[name]) - wanted[name]).abs().max() / wanted[name].abs().max()
        assert blocks.is_exact == (case in EXACT)
        assert gap == 0 if blocks.is_exact else 0 < gap < 1e-3


def test_columns_in_the_order_of_activations(tmp_path: Path) -> None:
    """The groups are not runs of columns, so no block format holds them; the values are exact."""
    rng = np.random.default_rng(0)

    def store(stem: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        held = random_integers(rng, shape, 4, 64, symmetric=False)
        held.group[:] = rng.permutation(held.group)
        return gptq(stem, held, 4), held.values

    wanted = write_checkpoint(tmp_path, GPTQ | {"desc_act": True}, store)
    for key, ref in open_model(str(tmp_path)).tensors.items():
        assert torch.equal(ref.read(), wanted[key]), key
        assert quantized_blocks(ref) is None


def test_modules_that_are_not_quantized(tmp_path: Path) -> None:
    """They are stored as they are, and biases of zeros that the model does not have are left out."""
    wanted = _write(tmp_path, "gptq", modules_to_not_convert=["q_proj"])
    file, stem = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj"
    held = {key: value for key, value in load_file(file).items() if not key.startswith(stem)}
    values = torch.randn(128, 128)
    save_file(held | {f"{stem}.weight": values, f"{stem}.bias": torch.zeros(128)}, file)
    tensors = open_model(str(tmp_path)).tensors
    assert torch.equal(tensors[f"{stem}.weight"].read(), values)
    other = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(tensors[other].read(), wanted[other])
    save_file(held | {f"{stem}.weight": values, f"{stem}.bias": torch.ones(128)}, file)
    assert f"contains {stem}.bias, which the model" in _refusal(tmp_path)


def test_float16_checkpoints_are_captured_in_another_dtype(tmp_path: Path) -> None:
    """Values beside the blocks decide: the embedding, the head and the norms."""
    _write(tmp_path, "awq", symmetric=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    for dtype, other in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        save_file({key: value.to(dtype).half() if "proj" not in key else value for key, value in held.items()}, file)
        opened = open_model(str(tmp_path))
        assert {value.dtype for value in opened.example.module.parameters()} == {other}
        for key, value in load_file(file).items():
            if key in opened.tensors:
                assert torch.equal(opened.tensors[key].read().to(value.dtype), value), key


@pytest.mark.parametrize("scale", ["block", "tensor", "row"])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_fp8(tmp_path: Path, method: str, scale: str) -> None:
    torch.manual_seed(0)
    size = 48  # the last block of 128 rows is shorter

    def store(stem: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = shape
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
        sizes = {"block": (-(-rows // size), -(-columns // size)), "tensor": (1,), "row": (rows, 1)}[scale]
        scales = torch.rand(sizes) / 100 + 1e-3
        wanted = codes.float().clone()
        for row in range(rows):
            for column in range(columns):
                at = {"block": (row // size, column // size), "tensor": (0,), "row": (row, 0)}[scale]
                wanted[row, column] *= scales[at]
        end = "weight_scale_inv" if method == "fp8" else "weight_scale"
        return {f"{stem}.weight": codes, f"{stem}.{end}": scales, f"{stem}.input_scale": torch.ones(1)}, wanted

    stated: dict[str, Any] = {"quant_method": method, "format": "float-quantized"}
    if scale == "block" and method == "fp8":
        stated["weight_block_size"] = [size, size]
    elif scale == "block":
        stated["config_groups"] = {"group_0": {"weights": {"num_bits": 8, "block_structure": [size, size]}}}
    wanted = write_checkpoint(tmp_path, stated, store)
    _check_rounding(tmp_path, wanted)


def _check_rounding(folder: Path, wanted: dict[str, Tensor]) -> None:
    """Values are exact in float32, and rounded once in bfloat16."""
    from inlay.frontend.huggingface.checkpoint import HFOptions

    rounded = open_model(str(folder), HFOptions(torch.bfloat16)).tensors
    for key, ref in open_model(str(folder)).tensors.items():
        assert torch.equal(ref.read(), wanted[key]), key
        gap = (rounded[key].read().float() - wanted[key]).abs()
        assert bool((gap <= wanted[key].abs() * 2**-8).all())


@pytest.mark.parametrize("groups", [1, 2])
def test_int8(tmp_path: Path, groups: int) -> None:
    torch.manual_seed(0)

    def store(stem: str, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales = torch.randint(-128, 128, shape, dtype=torch.int8), torch.rand(shape[0], groups).half()
        wanted = codes.float() * scales.float().repeat_interleave(shape[1] // groups, 1)
        return {f"{stem}.weight": codes, f"{stem}.weight_scale": scales}, wanted

    wanted = write_checkpoint(tmp_path, {"quant_method": "compressed-tensors", "format": "int-quantized"}, store)
    for key, ref in open_model(str(tmp_path)).tensors.items():
        assert torch.equal(ref.read(), wanted[key])
        if "proj" in key:
            assert torch.equal(_block_values(ref), wanted[key])


GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}


def test_mxfp4(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from tests.models import random_model

    rng = np.random.default_rng(0)
    random_model(GPT_OSS).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held, wanted = {}, {}
    for name, weight in load_file(file).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            held[name] = wanted[name] = weight
            continue
        experts, columns, rows = weight.shape
        codes = rng.integers(0, 16, (experts, rows, columns))
        powers = rng.integers(100, 130, (experts, rows, columns // 32))
        values = np.empty((experts, columns, rows), np.float32)
        for expert, row, column in np.ndindex(experts, rows, columns):
            values[expert, column, row] = E2M1[codes[expert, row, column]] * 2.0 ** (
                powers[expert, row, column // 32] - 127
            )
        wanted[name] = torch.from_numpy(values)
        blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(experts, rows, columns // 32, 16)
        held[f"{name}_blocks"] = torch.from_numpy(blocks.astype(np.uint8))
        held[f"{name}_scales"] = torch.from_numpy(powers.astype(np.uint8))
        assert torch.equal(
            convert_moe_packed_tensors(held[f"{name}_blocks"], held[f"{name}_scales"], dtype=torch.float32),
            wanted[name],
        ), "as transformers reads it"
    save_file(held, file)
    config_folder(tmp_path, **GPT_OSS, quantization_config={"quant_method": "mxfp4"})
    from inlay.frontend.huggingface.checkpoint import HFOptions

    for dtype in (torch.float32, torch.bfloat16):  # E2M1 times a power of two is exact in both
        for key, ref in open_model(str(tmp_path), HFOptions(dtype)).tensors.items():
            if key.endswith(("gate_up_proj", "down_proj")):
                assert torch.equal(ref.read().float(), wanted[key]), key


def _refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        _read_all(folder)
    return str(refused.value)


def _read_all(folder: Path) -> None:
    for ref in open_model(str(folder)).tensors.values():
        quantized_blocks(ref)
        ref.read()


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (GPTQ | {"bits": 3}, "gptq (bits 3, group_size 64) (see config.json), with 3 bits, which is not"),
        (GPTQ | {"checkpoint_format": "marlin"}, "with the layout marlin, which is not supported yet"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "with different settings for some layers, which is not"),
        (GPTQ | {"group_size": 0}, "with groups of 0, which is not"),
        (AWQ | {"version": "gemv"}, "with the layout gemv, which is not"),
        (AWQ | {"zero_point": False}, "with no zero points, which is not"),
        (PACKED | {"transform_config": {"config_groups": {"R1": {}}}}, "with transform_config, which is not"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "with the format nvfp4-pack-quantized, which is not"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "fp8 (weight_block_size [0, 128])"),
    ],
)
def test_settings_that_are_not_read(tmp_path: Path, stated: dict[str, Any], said: str) -> None:
    config_folder(tmp_path, quantization_config=stated)
    assert said in _refusal(tmp_path)


def test_mixed_formats_of_compressed_tensors(tmp_path: Path) -> None:
    """Each group of layers states its own."""
    groups = {"a": {"format": "pack-quantized"}, "b": {"format": "float-quantized"}}
    wanted = _write(tmp_path, "packed", format="mixed-precision", config_groups=groups)
    for key, ref in open_model(str(tmp_path)).tensors.items():
        assert torch.equal(ref.read(), wanted[key]), key
    groups["b"]["format"] = "nvfp4-pack-quantized"
    _write(tmp_path, "packed", format="mixed-precision", config_groups=groups)
    assert "with the format nvfp4-pack-quantized, which is not" in _refusal(tmp_path)


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    _write(tmp_path, "gptq")
    file, stem = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj"
    held = load_file(file)
    scales = held[f"{stem}.scales"]
    save_file({key: value for key, value in held.items() if key != f"{stem}.scales"}, file)
    assert _refusal(tmp_path).startswith(f"{stem}.qweight is quantized, but {stem}.scales is missing.")
    save_file(held | {f"{stem}.scales": scales[:1].clone()}, file)
    assert _refusal(tmp_path).startswith(
        f"{stem}.scales is stored as F16 [1, 256] instead of F16 or BF16 or F32 [2, 256]."
    )
    save_file(held | {f"{stem}.scales": scales.double()}, file)
    assert f"{stem}.scales is stored as F64" in _refusal(tmp_path)
    save_file(held | {f"{stem}.g_idx": torch.full((128,), 2, dtype=torch.int32)}, file)
    assert "names a group beyond the 2 stored ones" in _refusal(tmp_path)
    save_file(held | {f"{stem}.qzeros": torch.full((2, 32), -1, dtype=torch.int32)}, file)
    assert "stores the zero point 15, which libraries read as 0 or as 16" in _refusal(tmp_path)


@pytest.mark.parametrize("base", ["org/base", None])
def test_adapters_are_refused(tmp_path: Path, base: str | None) -> None:
    stated = {"peft_type": "LORA", "base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(stated))
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    said = f"is a LORA adapter{' of org/base' if base else ''}, not a whole model. Merge it into its model"
    assert said in _refusal(tmp_path)
    config_folder(tmp_path, **MODEL)
    assert said in _refusal(tmp_path), "with the configuration of its model beside"
