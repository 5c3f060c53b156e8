"""Hugging Face folders, ids and GGUF files: a stock decoder without weights, and references to its weights."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import ModelError, one_line
from inlay.frontend.fake_tensors import check_buffers, fake_parameters
from inlay.frontend.huggingface.quantization_checks import (
    find_quantization,
    refuse_quantization_tensors,
    refuse_quantized_dtype,
    summarize_names,
)
from inlay.frontend.safetensors_files import SafetensorsTensor, index_folder
from inlay.frontend.source_model import Example, SourceModel
from inlay.program.decoder import SIGNATURE
from inlay.program.tracing_lock import tracing_lock
from inlay.program.weights import CastTensor, MissingTensor, is_bfloat16, quantized_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from inlay.frontend.gguf.reader import GGUFFile
    from inlay.frontend.huggingface.quantized_weights import QuantizedTensor
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


def open_folder(folder: Path, name: str, options: HFOptions) -> SourceModel:
    """Open a model folder with a `config.json` and, usually, safetensors files."""
    config = _load_config(folder, name, options)
    quantization = find_quantization(folder, name)
    files = index_folder(folder)
    if not files and any(folder.glob("*.bin")):
        raise ModelError(
            f"{name} stores its weights in pickled .bin files, which can run code when they are loaded.",
            "Convert them to safetensors, for example with save_pretrained of transformers.",
        )
    stored: Mapping[str, SafetensorsTensor | QuantizedTensor]
    stored = files if quantization is None else quantization.decode(files)
    model = _build_module(config, name, options)
    leftover: list[str] = []
    if stored:
        from inlay.frontend.huggingface.weight_conversion import map_tensors, unexpected_keys

        refs = map_tensors(stored, model)
        leftover = [key for key in unexpected_keys(refs, model) if quantization is None or not _is_zero_bias(refs, key)]
        refuse_quantization_tensors(name, leftover)
        if quantization is not None and options.dtype is None and _has_float16(model):
            model = _build_module(config, name, replace(options, dtype=_find_dtype(refs)))
    else:
        refs = {key: MissingTensor(key) for key in model.state_dict()}
    tensors = _bind_weights(model, name, refs)
    _check_unexpected_weights(name, leftover, "Use the checkpoint that belongs to the configuration.")
    tokenizer = partial(_load_tokenizer, folder, name, trust_remote_code=options.trust_remote_code)
    return _build_source_model(model, name, "huggingface", tensors, tokenizer)


def open_gguf(path: Path, options: HFOptions) -> SourceModel:
    """Open a GGUF file; the weight references give access to its quantized blocks."""
    header, config = _load_gguf_config(path)
    from inlay.frontend.gguf.conversion import find_dtype, map_tensors
    from inlay.frontend.gguf.reader import check_storage_types

    check_storage_types(path.name, header)
    model = _build_module(config, path.name, HFOptions(options.dtype or torch.float32))
    refs, leftover = map_tensors(header, model)
    if options.dtype is None and (dtype := find_dtype(refs)) is not torch.float32:
        model = _build_module(config, path.name, HFOptions(dtype))
    tensors = _bind_weights(model, path.name, refs)
    _check_unexpected_weights(path.name, leftover, "Use the Hugging Face checkpoint of the model.")
    tokenizer = partial(_load_tokenizer, path.parent, path.name, gguf_file=path.name)
    return _build_source_model(model, path.name, "gguf", tensors, tokenizer)


def _find_dtype(refs: Mapping[str, TensorRef]) -> torch.dtype:
    """Return the dtype for a quantized checkpoint in float16, whose activations might overflow.

    It is bfloat16 if that represents every value that is not stored in blocks exactly, otherwise float32.
    """
    plain = (ref for ref in refs.values() if quantized_blocks(ref) is None)
    return torch.bfloat16 if all(is_bfloat16(ref.read()) for ref in plain) else torch.float32


def _has_float16(model: Any) -> bool:
    return any(value.dtype is torch.float16 for value in model.parameters())


def _is_zero_bias(refs: Mapping[str, TensorRef], name: str) -> bool:
    """Whether a tensor is a bias of zeros, which quantizers add to layers that have none."""
    return name.endswith(".bias") and not bool(refs[name].read().any())


def _check_unexpected_weights(name: str, leftover: list[str], remedy: str) -> None:
    """Reject weights that the model does not use: they belong to another model."""
    if leftover:
        raise ModelError(
            f"{name} contains {summarize_names(leftover)}, which the model that transformers builds from its"
            " configuration does not use. The weights belong to another model.",
            remedy,
        )


def folder_architecture(folder: Path, name: str, options: HFOptions) -> str:
    """Return the architecture of a Hugging Face folder; only the configuration is read."""
    return _architecture(_load_config(folder, name, options))


def gguf_architecture(path: Path) -> str:
    """Return the architecture of a GGUF file, as transformers names it; only the header is read."""
    return _architecture(_load_gguf_config(path)[1])


def _architecture(config: Any) -> str:
    return str(config.get_text_config().model_type)


def _load_config(folder: Path, name: str, options: HFOptions) -> Any:
    transformers = _import_transformers()
    try:
        with tracing_lock():
            return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    except Exception as error:
        raise _config_error(name, error) from error


def _load_gguf_config(path: Path) -> tuple[GGUFFile, Any]:
    try:
        import gguf as _  # noqa: F401
    except ImportError as error:
        raise ModelError("Reading a GGUF file needs the gguf package.", "pip install 'inlay[gguf]'") from error
    _import_transformers()
    from inlay.frontend.gguf.conversion import read_config
    from inlay.frontend.gguf.reader import read_header

    header = read_header(path)
    with tracing_lock():
        return header, read_config(header)


def _load_tokenizer(folder: Path, name: str, **arguments: Any) -> Any:
    try:
        with tracing_lock():
            return _import_transformers().AutoTokenizer.from_pretrained(folder, **arguments)
    except Exception as error:
        raise ModelError(
            f"The tokenizer of {name} cannot be read: {one_line(error)}.",
            "Check that tokenizer.json is in the same folder as config.json.",
        ) from error


def _build_module(config: Any, name: str, options: HFOptions) -> Any:
    _refuse_encoder_decoder(config, name)
    for each in (config, config.get_text_config()):  # of a multimodal model, the text part decides
        each.use_cache = False
        each.__dict__.pop("quantization_config", None)  # weights are decoded when they are read
    dtype = {"dtype": options.dtype} if options.dtype is not None else {}
    try:
        with tracing_lock(), fake_parameters():
            model = _auto_class(config).from_config(config, trust_remote_code=options.trust_remote_code, **dtype)
        model.tie_weights()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers cannot build a causal language model from the configuration of {name}: {one_line(error)}.",
            "For another kind of model, write a factory and pass it as package.module:factory.",
        ) from error
    check_buffers(model)
    _check_class(model, name)
    _refuse_recurrent(model, name)
    return model.eval()


def _auto_class(config: Any) -> Any:
    """Return the auto class that builds the model of a checkpoint.

    A multimodal model is built whole if its checkpoint says so, or if it has no class for text alone. Capture leaves
    out what tokens do not reach.
    """
    transformers = _import_transformers()
    multimodal = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    if type(config) in multimodal and config.get_text_config() is not config:
        is_stated = multimodal[type(config)].__name__ in (config.architectures or ())
        if is_stated or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            return transformers.AutoModelForMultimodalLM
    return transformers.AutoModelForCausalLM


def _refuse_encoder_decoder(config: Any, name: str) -> None:
    if config.is_encoder_decoder:
        stated = f" ({', '.join(config.architectures)})" if config.architectures else ""
        raise ModelError(
            f"{name} is a model with an encoder and a decoder{stated}. A causal language model built from its"
            " configuration would only be its decoder.",
            "Write a factory that returns the part you need and pass it as package.module:factory.",
        )


def _refuse_recurrent(model: Any, name: str) -> None:
    """Reject a model without attention layers: its state does not fit into a KV cache."""
    from inlay.frontend.huggingface.static_cache import cache_layers

    layers, attends = cache_layers(model.config)
    if layers and not attends:
        kinds = ", ".join(dict.fromkeys(getattr(model.config.get_text_config(), "layer_types", None) or ()))
        raise ModelError(
            f"{name} has convolution or recurrent states ({kinds or type(layers[0]).__name__} in all"
            f" {len(layers)} layers) instead of keys and values, which is not supported yet.",
            "Use a model with attention layers.",
        )


def _check_class(model: Any, name: str) -> None:
    """Reject a checkpoint whose configuration names another class of transformers than the one that was built."""
    made = {type(each).__name__ for each in (model, model.base_model)}
    stated = model.config.architectures or []
    known = [each for each in stated if hasattr(_import_transformers(), each)]
    if known and made.isdisjoint(stated):
        raise ModelError(
            f"{name} is a {known[0]}, not a causal language model: transformers would build a {type(model).__name__}"
            " from its configuration, which is a different model.",
            "Write a factory that returns the model you need and pass it as package.module:factory.",
        )


def _build_source_model(
    model: Any, name: str, kind: str, tensors: Mapping[str, TensorRef], tokenizer: Callable[[], Any]
) -> SourceModel:
    facts, architecture = read_config_facts(model)
    vocabulary = max(1, facts.get("vocabulary", 1))
    ids = (torch.arange(16) % vocabulary).reshape(2, 8)
    example = Example(model, (), {SIGNATURE.tokens: ids}, {SIGNATURE.tokens: {0: "batch", 1: "length"}})
    limits = {"length": facts["max_length"]} if facts.get("max_length", 0) > 8 else {}
    return SourceModel(
        name=name,
        kind=kind,
        example=example,
        tensors=tensors,
        config_facts=facts,
        architecture=architecture,
        max_sizes=limits,
        load_tokenizer=tokenizer,
    )


def read_config_facts(model: Any) -> tuple[dict[str, int], str]:
    """Return the facts that the configuration of a stock model states, by name, and its architecture."""
    config = model.config.get_text_config()
    facts: dict[str, int] = {}
    for fact, key in _CONFIG_FACTS.items():
        with suppress(RuntimeError):  # the layers differ in it
            value = getattr(config, key, None)
            facts |= {fact: value} if isinstance(value, int) else {}
    return facts, _architecture(model.config)


def _bind_weights(model: Any, name: str, refs: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
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


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError("Hugging Face models need the transformers package.", "pip install 'inlay[hf]'") from error
    return transformers
