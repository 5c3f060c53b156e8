"""Hugging Face folders, ids and GGUF files: a stock decoder without weights, and references to its weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import ModelError, one_line
from inlay.frontend.fake_tensors import check_buffers, fake_parameters
from inlay.frontend.huggingface.checkpoint import (
    HFOptions,
    architecture_name,
    bind_weights,
    check_unexpected_weights,
    import_transformers,
    index_weights,
    load_config,
    load_tokenizer,
    map_weights,
    read_config_facts,
    replaced_float16,
)
from inlay.frontend.source_model import Example, SourceModel
from inlay.program.decoder import SIGNATURE
from inlay.program.tracing_lock import tracing_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from inlay.frontend.gguf.reader import GGUFFile
    from inlay.program.weights import TensorRef


def open_folder(folder: Path, name: str, options: HFOptions) -> SourceModel:
    """Open a model folder with a `config.json` and, usually, safetensors files."""
    config = load_config(folder, name, options)
    stored = index_weights(folder, name)
    model = _build_module(config, name, options)
    refs, leftover = map_weights(stored, model, name)
    if (dtype := replaced_float16(stored, refs, model, options)) is not None:
        model = _build_module(config, name, replace(options, dtype=dtype))
    tensors = bind_weights(model, name, refs)
    check_unexpected_weights(name, leftover, "Use the checkpoint that belongs to the configuration.")
    tokenizer = partial(load_tokenizer, folder, name, trust_remote_code=options.trust_remote_code)
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
    tensors = bind_weights(model, path.name, refs)
    check_unexpected_weights(path.name, leftover, "Use the Hugging Face checkpoint of the model.")
    tokenizer = partial(load_tokenizer, path.parent, path.name, gguf_file=path.name)
    return _build_source_model(model, path.name, "gguf", tensors, tokenizer)


def folder_architecture(folder: Path, name: str, options: HFOptions) -> str:
    """Return the architecture of a Hugging Face folder; only the configuration is read."""
    return architecture_name(load_config(folder, name, options))


def gguf_architecture(path: Path) -> str:
    """Return the architecture of a GGUF file, as transformers names it; only the header is read."""
    return architecture_name(_load_gguf_config(path)[1])


def _load_gguf_config(path: Path) -> tuple[GGUFFile, Any]:
    try:
        import gguf as _  # noqa: F401
    except ImportError as error:
        raise ModelError("Reading a GGUF file needs the gguf package.", "pip install 'inlay[gguf]'") from error
    import_transformers()
    from inlay.frontend.gguf.conversion import read_config
    from inlay.frontend.gguf.reader import read_header

    header = read_header(path)
    with tracing_lock():
        return header, read_config(header)


def _build_module(config: Any, name: str, options: HFOptions) -> Any:
    _refuse_encoder_decoder(config, name)
    for each in (config, config.get_text_config()):  # of a multimodal model, the text part decides
        each.use_cache = False
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
    transformers = import_transformers()
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
    known = [each for each in stated if hasattr(import_transformers(), each)]
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
