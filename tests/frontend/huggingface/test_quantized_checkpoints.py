"""Checkpoints that are quantised in forms that are not read, and weights of another model: refused, never guessed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inlay.errors import ModelError
from inlay.frontend import open_model
from tests.models import LLAMA, config_folder, llama_folder, tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.fast


def _fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: (weight * 100).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}


def _fp8_scale(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: (weight * 100).to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(weight.shape[0], 1)}


def _int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: (weight * 100).to(torch.int8), f"{name}_scale": torch.ones(weight.shape[0], 1)}


def _bnb8(name: str, weight: Tensor) -> dict[str, Tensor]:
    stem = name.removesuffix("weight")
    return {name: (weight * 100).to(torch.int8), f"{stem}SCB": torch.ones(weight.shape[0])}


def _nf4(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {
        name: torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8),
        f"{name}.absmax": torch.ones(weight.numel() // 64),
        f"{name}.quant_map": torch.ones(16),
        f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(64, dtype=torch.uint8),
    }


def _gptq(name: str, weight: Tensor) -> dict[str, Tensor]:
    stem, (rows, columns) = name.removesuffix("weight"), weight.shape
    return {
        f"{stem}qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        f"{stem}qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
        f"{stem}scales": torch.ones(1, rows, dtype=torch.float16),
        f"{stem}g_idx": torch.zeros(columns, dtype=torch.int32),
    }


def _awq(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {key: value for key, value in _gptq(name, weight).items() if not key.endswith("g_idx")}


def _packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {
        f"{name}_packed": torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32),
        f"{name}_scale": torch.ones(weight.shape[0], 1),
        f"{name}_shape": torch.tensor(weight.shape),
    }


def _mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    blocks = torch.zeros(weight.shape[0], weight.shape[1] // 32, 16, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": blocks[..., 0].clone()}


def _mlx(name: str, weight: Tensor) -> dict[str, Tensor]:
    stem, ones = name.removesuffix("weight"), torch.ones(weight.shape[0], 1, dtype=torch.float16)
    packed = torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.uint32)
    return {name: packed, f"{stem}scales": ones, f"{stem}biases": ones.clone()}


KINDS: dict[str, tuple[Callable[[str, Tensor], dict[str, Tensor]], dict[str, Any], str]] = {
    "fp8": (
        _fp8,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "",
    ),
    "compressed-tensors fp8": (
        _fp8_scale,
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        "",
    ),
    "compressed-tensors w8a8": (
        _int8,
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        "",
    ),
    "compressed-tensors w4a16": (
        _packed,
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "",
    ),
    "bitsandbytes int8": (
        _bnb8,
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "bitsandbytes (load_in_8bit)",
    ),
    "bitsandbytes nf4": (
        _nf4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes (bnb_4bit_quant_type nf4, load_in_4bit)",
    ),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128}, ""),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 128}, ""),
    "mxfp4": (_mxfp4, {"quant_method": "mxfp4"}, ""),
    "mlx": (_mlx, {"group_size": 64, "bits": 4}, "MLX (bits 4, group_size 64)"),
    "torchao": (_int8, {"quant_method": "torchao", "quant_type": "int8wo"}, "torchao"),
    "quark": (_fp8_scale, {"quant_method": "quark"}, "quark"),
    "one to come": (_int8, {"quant_method": "tomorrow"}, "tomorrow"),
}
"""What becomes of a weight, what config.json says of it, and what is said to the user if it is not read."""


NAMES = (
    *("aqlm", "auto-round", "bitnet", "eetq", "fbgemm_fp8", "fp_quant", "higgs", "hqq", "modelopt", "nvfp4", "quanto"),
    *("quark", "spqr", "torchao", "vptq"),
)
"""Methods of transformers that are not read."""


def _folder(folder: Path, kind: str, *, stated: bool) -> str:
    """A Llama whose layers are stored in a quantised form."""
    llama_folder(folder)
    file, (store, config, _) = folder / "model.safetensors", KINDS[kind]
    held: dict[str, Tensor] = {}
    for name, weight in load_file(file).items():
        linear = "layers" in name and weight.dim() == 2
        held |= store(name, weight) if linear else {name: weight}
    save_file(held, file)
    if stated:
        key = "quantization" if kind == "mlx" else "quantization_config"
        (folder / "config.json").write_text(json.dumps(LLAMA | {key: config}))
    return str(folder)


def _refusal(model: str) -> str:
    with pytest.raises(ModelError) as refused:
        open_model(model)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert "download" not in sentence.lower()
    assert "damaged" not in sentence
    return sentence


@pytest.mark.parametrize("kind", [kind for kind, (_, _, said) in KINDS.items() if said])
def test_as_published(tmp_path: Path, kind: str) -> None:
    said = _refusal(_folder(tmp_path / "it", kind, stated=True))
    assert said.startswith(f"it is quantized by {KINDS[kind][2]} (see config.json), which is not supported yet.")


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_word_in_the_configuration(tmp_path: Path, kind: str) -> None:
    """Tensors that belong to quantised weights tell."""
    assert "which belong to an unsupported quantization format" in _refusal(_folder(tmp_path, kind, stated=False))


@pytest.mark.parametrize(("kind", "form"), [("fp8", "F8_E4M3"), ("bitsandbytes int8", "I8"), ("mlx", "U32")])
def test_without_scales(tmp_path: Path, kind: str, form: str) -> None:
    """The number format that a weight is stored in tells."""
    model = _folder(tmp_path, kind, stated=False)
    file = tmp_path / "model.safetensors"
    parts = ("scale", "SCB", "biases")
    save_file({key: value for key, value in load_file(file).items() if not any(each in key for each in parts)}, file)
    assert f"_proj.weight as {form}, a quantized format" in _refusal(model)


@pytest.mark.parametrize(
    ("file", "stated", "said"),
    [
        ("quantize_config.json", {"bits": 3}, "gptq (bits 3) (see quantize_config.json), with 3 bits,"),
        ("quant_config.json", {"w_bit": 3}, "awq (w_bit 3) (see quant_config.json), with 3 bits,"),
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}}, "modelopt (see hf_quant_config.json),"),
    ],
)
def test_files_beside(tmp_path: Path, file: str, stated: dict[str, Any], said: str) -> None:
    (config_folder(tmp_path) / file).write_text(json.dumps(stated))
    assert f"is quantized by {said} which is not supported yet." in _refusal(str(tmp_path))


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes (load_in_4bit)"),
        ({"quantization_config": {"bits": 4}}, "an unnamed method (bits 4)"),
        ({"compression_config": {"format": "marlin-24"}}, "compressed-tensors (format marlin-24)"),
        *(({"quantization_config": {"quant_method": each}}, each) for each in NAMES),
    ],
)
def test_methods_are_named(tmp_path: Path, stated: dict[str, Any], said: str) -> None:
    config_folder(tmp_path, **stated)
    assert f"is quantized by {said} (see config.json), " in _refusal(str(tmp_path))


def test_a_part_of_the_configuration(tmp_path: Path) -> None:
    part = {"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}
    config_folder(tmp_path / "it", model_type="llava", text_config=part)
    assert "is quantized by hqq" in _refusal(str(tmp_path / "it"))
    config_folder(tmp_path / "it", text_config=part)
    assert "it has a part for text, which LlamaConfig does not have" in _refusal(str(tmp_path / "it"))


def _with_tensor(folder: Path, name: str, *shape: int) -> str:
    llama_folder(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(shape or (4,))}, file)
    return str(folder)


def test_weights_of_another_model(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    said = _refusal(_with_tensor(tmp_path / "it", name))
    assert said.startswith(f"it contains {name}, which the model that transformers builds from its configuration")
    assert "does not use. The weights belong to another model." in said


def test_buffers_of_older_checkpoints_are_harmless(tmp_path: Path) -> None:
    assert open_model(_with_tensor(tmp_path, "model.layers.0.self_attn.rotary_emb.inv_freq"))


@pytest.mark.parametrize("name", ["attn.attention.masked_bias", "attn.causal_mask"])
def test_masks_of_older_checkpoints_are_harmless(tmp_path: Path, name: str) -> None:
    assert open_model(_with_tensor(tmp_path, f"model.layers.0.{name}"))


def test_a_mask_that_is_called_a_bias(tmp_path: Path) -> None:
    """With four axes it is the mask; a bias of the layer has one."""
    name = "model.layers.0.attn.bias"
    assert open_model(_with_tensor(tmp_path / "mask", name, 1, 1, 8, 8))
    assert f"contains {name}, which the model" in _refusal(_with_tensor(tmp_path / "bias", name, 8))


def test_a_storage_type_that_is_not_read(tmp_path: Path) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_K
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    file = tiny_gguf(
        tmp_path / "one.gguf",
        more=lambda writer: writer.add_tensor("more.weight", block, raw_shape=block.shape, raw_dtype=kind),
    )
    assert _refusal(str(file)).startswith("one.gguf stores tensors as Q8_K, which is not supported yet.")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (31, "one.gguf stores blk.0.attn_q.weight as Q4_0_4_4, a format that GGUF no longer has."),
        (
            99,
            "one.gguf stores blk.0.attn_q.weight in a format with the number 99, which the gguf package does not know.",
        ),
    ],
)
def test_a_storage_type_that_is_not_known(tmp_path: Path, kind: int, said: str) -> None:
    file = tiny_gguf(tmp_path / "one.gguf")
    data, name = bytearray(file.read_bytes()), b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # the number of axes and their sizes are before it
    data[at : at + 4] = kind.to_bytes(4, "little")
    file.write_bytes(data)
    assert _refusal(str(file)).startswith(said)


def _factors(value: float) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor("rope_freqs.weight", np.full(8, value, np.float32))


def test_rotary_factors_of_a_gguf_file(tmp_path: Path) -> None:
    """transformers does not read them, so the rotary embedding would be another one."""
    assert open_model(str(tiny_gguf(tmp_path / "one.gguf", more=_factors(1.0))))
    said = _refusal(str(tiny_gguf(tmp_path / "two.gguf", more=_factors(2.0))))
    assert said.startswith("two.gguf contains rope_freqs.weight, which the model")


WHISPER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 16}
MAMBA2 = {"num_hidden_layers": 2, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "whisper": (WHISPER, "is a model with an encoder and a decoder (WhisperForConditionalGeneration)"),
    "t5": ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "with an encoder and a decoder"),
    "bert": (
        {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
        "is a BertForSequenceClassification, not a causal language model",
    ),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "is a LlamaForSequenceClassification"),
    "mamba2": (
        {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], **MAMBA2},
        "has convolution or recurrent states (linear_attention in all 2 layers) instead of keys and",
    ),
}
"""Configurations, and what is said of each."""


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_are_no_decoders(tmp_path: Path, name: str) -> None:
    config, said = OTHERS[name]
    assert said in _refusal(str(config_folder(tmp_path, **config)))
