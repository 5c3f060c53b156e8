"""What every Hugging Face checkpoint has, whatever model it holds: a configuration, weights and a tokenizer."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import ModelError, one_line
from inlay.frontend.huggingface.quantization_checks import (
    find_quantization,
    refuse_quantization_tensors,
    refuse_quantized_dtype,
    summarize_names,
)
from inlay.frontend.huggingface.quantized_weights import QuantizedTensor
from inlay.frontend.safetensors_files import SafetensorsTensor, index_folder
from inlay.program.tracing_lock import tracing_lock
from inlay.program.weights import CastTensor, MissingTensor, is_bfloat16, quantized_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from inlay.program.weights import TensorRef

_CONFIG_FACTS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "hidden_size": "hidden_size",
    "vocabulary": "vocab_size",
    "max_length": "max_position_embeddings",
}


@dataclass(frozen=True)
class HFOptions:
    """Options for loading a Hugging Face model. Remote code runs only if `trust_remote_code` is set."""

    dtype: torch.dtype | None = None
    trust_remote_code: bool = False


def load_config(folder: Path, name: str, options: HFOptions) -> Any:
    """Load the configuration of a folder."""
    transformers = import_transformers()
    try:
        with tracing_lock():
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    except Exception as error:
        raise _config_error(name, error) from error
    if isinstance(config.get_text_config(), dict):
        raise ModelError(
            f"The configuration of {name} has a part for text, which {type(config).__name__} does not have.",
            "Check its config.json.",
        )
    for each in (config, config.get_text_config()):
        each.__dict__.pop("quantization_config", None)  # weights are decoded when they are read
    return config


def load_tokenizer(folder: Path, name: str, **arguments: Any) -> Any:
    """Load the tokenizer of a folder."""
    try:
        with tracing_lock():
            return import_transformers().AutoTokenizer.from_pretrained(folder, **arguments)
    except Exception as error:
        raise ModelError(
            f"The tokenizer of {name} cannot be read: {one_line(error)}.",
            "Check that tokenizer.json is in the same folder as config.json.",
        ) from error


def index_weights(folder: Path, name: str) -> Mapping[str, SafetensorsTensor | QuantizedTensor]:
    """Return the tensors of a folder; empty if it has a configuration only. Formats that are not read are rejected."""
    quantization = find_quantization(folder, name)
    stored = index_folder(folder)
    if not stored and any(folder.glob("*.bin")):
        raise ModelError(
            f"{name} stores its weights in pickled .bin files, which can run code when they are loaded.",
            "Convert them to safetensors, for example with save_pretrained of transformers.",
        )
    return stored if quantization is None else quantization.decode(stored)


def holds_quantized(stored: Mapping[str, TensorRef]) -> bool:
    """Whether some tensors of a checkpoint are quantized."""
    return any(isinstance(ref, QuantizedTensor) for ref in stored.values())


def replaced_float16(
    stored: Mapping[str, TensorRef], refs: Mapping[str, TensorRef], model: Any, options: HFOptions
) -> torch.dtype | None:
    """Return the dtype to use for a quantized checkpoint in float16, whose activations might overflow; None for others.

    It is bfloat16 if that represents every value that is not stored in blocks exactly, otherwise float32.
    """
    is_float16 = any(value.dtype is torch.float16 for value in model.parameters())
    if options.dtype is not None or not is_float16 or not holds_quantized(stored):
        return None
    plain = (ref for ref in refs.values() if quantized_blocks(ref) is None)
    return torch.bfloat16 if all(is_bfloat16(ref.read()) for ref in plain) else torch.float32


def map_weights(
    stored: Mapping[str, SafetensorsTensor | QuantizedTensor], model: Any, name: str
) -> tuple[dict[str, TensorRef], list[str]]:
    """Map parameters to tensors of a checkpoint; also return the tensors that the model does not use."""
    if not stored:
        return {key: MissingTensor(key) for key in model.state_dict()}, []
    from inlay.frontend.huggingface.weight_conversion import map_tensors, unexpected_keys

    refs = map_tensors(stored, model)
    is_quantized = holds_quantized(stored)
    leftover = [key for key in unexpected_keys(refs, model) if not (is_quantized and _is_zero_bias(refs, key))]
    refuse_quantization_tensors(name, leftover)
    return refs, leftover


def _is_zero_bias(refs: Mapping[str, TensorRef], name: str) -> bool:
    """Whether a tensor is a bias of zeros, which quantizers add to layers that have none."""
    return name.endswith(".bias") and not bool(refs[name].read().any())


def bind_weights(model: Any, name: str, refs: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Bind every parameter to a reference of the right shape and dtype; tied parameters share one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    owners: dict[int, str] = {}
    for target, value in parameters.items():
        if target in refs:
            owners.setdefault(id(value), target)
    missing = [target for target, value in parameters.items() if id(value) not in owners]
    if missing:
        raise ModelError(
            f"{name} lacks the weights {summarize_names(missing)}.",
            "Check that the download is complete and that the configuration belongs to this checkpoint.",
        )
    bound: dict[str, TensorRef] = {}
    for target, value in parameters.items():
        ref = refs[owners[id(value)]]
        if value.is_floating_point():
            refuse_quantized_dtype(name, target, _dtype_names(ref))
        shape = getattr(ref, "shape", None)
        if shape is not None and tuple(shape) != tuple(value.shape):
            raise ModelError(
                f"{target} has shape {list(shape)} in {name}, but the configuration requires {list(value.shape)}.",
                "Check that the configuration belongs to this checkpoint, or download the file again.",
            )
        bound[target] = _cast(ref, value.dtype)
    for target, value in model.named_buffers():
        if target in refs and not isinstance(refs[target], MissingTensor):
            if value.is_floating_point():
                refuse_quantized_dtype(name, target, _dtype_names(refs[target]))
            bound[target] = _cast(refs[target], value.dtype)
    return bound


def _dtype_names(ref: TensorRef) -> tuple[str, ...]:
    """Return the stored dtypes of a reference; empty if its file format defines how to decode values."""
    return (ref.dtype_name,) if isinstance(ref, SafetensorsTensor) else getattr(ref, "dtype_names", ())


def _cast(ref: TensorRef, dtype: torch.dtype) -> TensorRef:
    return ref if isinstance(ref, MissingTensor) else CastTensor(ref, dtype)


def check_unexpected_weights(name: str, leftover: list[str], remedy: str) -> None:
    """Reject weights that the model does not use: they belong to another model."""
    if leftover:
        raise ModelError(
            f"{name} contains {summarize_names(leftover)}, which the model that transformers builds from its"
            " configuration does not use. The weights belong to another model.",
            remedy,
        )


def read_config_facts(model: Any) -> tuple[dict[str, int], str]:
    """Return the facts that the configuration of a stock model states, by name, and its architecture."""
    config = model.config.get_text_config()
    facts: dict[str, int] = {}
    for fact, key in _CONFIG_FACTS.items():
        with suppress(RuntimeError):  # the layers differ in it
            value = getattr(config, key, None)
            facts |= {fact: value} if isinstance(value, int) else {}
    return facts, architecture_name(model.config)


def architecture_name(config: Any) -> str:
    """Return the architecture that a configuration states, as transformers names it."""
    return str(config.get_text_config().model_type)


def _config_error(name: str, error: Exception) -> ModelError:
    text = str(error)
    known = re.search(r"model type `([^`]+)`", text)
    if known and "does not recognize" in text:
        return ModelError(
            f"{name} has model type {known.group(1)!r}, which the installed transformers does not support.",
            "Upgrade transformers, or check model_type in config.json.",
        )
    if "trust_remote_code" in text or "custom code" in text:
        return ModelError(
            f"{name} contains Python code, which is not run by default.",
            "Review that code, then pass --trust-remote-code.",
        )
    return ModelError(f"The configuration of {name} cannot be read: {one_line(error)}.", "Check its config.json.")


def import_transformers() -> Any:
    """Return transformers, or say how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError("Hugging Face models need the transformers package.", "pip install 'inlay[hf]'") from error
    return transformers
