"""Text encoders: folders of sentence-transformers and bare encoders, as modules that return one embedding for a text.

A folder of sentence-transformers lists its modules in `modules.json`: a transformer, a pooling, and optionally dense
layers and a normalization. A bare encoder gets mean pooling, as sentence-transformers does.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from inlay.errors import ModelError, one_line, printable
from inlay.frontend.fake_tensors import check_buffers, fake_parameters
from inlay.frontend.huggingface.checkpoint import (
    HFOptions,
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
from inlay.program.encoder import EMBEDDINGS, MASK, TOKEN_TYPES, TOKENS, EncoderFacts
from inlay.program.tracing_lock import tracing_lock
from inlay.program.weights import MissingTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.program.weights import TensorRef

_MODULES = "modules.json"
_REMEDY = "For another model, write a factory that returns it and pass it as package.module:factory."
_UNUSED_HEADS = re.compile(r"(^|\.)pooler\.|^cls\.seq_relationship\.")
"""Weights of checkpoints that embeddings do not use, and that the class a configuration states may not have."""
_UNLIMITED = 2048
"""Maximum length of a model that states none."""
_ARGUMENTS = re.compile("(model|config|tokenizer|processor|processing)_(kw)?args")
"""Settings of sentence_bert_config.json that change how transformers builds a model or a tokenizer."""


def find_transformer(folder: Path) -> Path:
    """Return the folder of the transformer: a folder of sentence-transformers may have it in a subfolder."""
    rows = _read_modules(folder)
    return folder / rows[0][1] if rows else folder


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the types of the modules in `modules.json`, and their folders; nothing if there is no such file."""
    found = []
    for row in _read_json(folder / _MODULES, []):
        kind, path = (row.get("type"), row.get("path")) if isinstance(row, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            problem = f"{_MODULES} does not give the type and the path of every module."
            raise ModelError(problem, "Download the model again.")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ModelError(f"{_MODULES} points outside its folder: {printable(path)}.", "Do not use this model.")
        found.append((kind, path))
    return found


def is_encoder(folder: Path, name: str, options: HFOptions) -> bool:
    """Whether a folder is an encoder: sentence-transformers wrote it, or transformers has the class as a masked LM."""
    if (folder / _MODULES).is_file():
        return True
    config, transformers = load_config(folder, name, options), import_transformers()
    masked = transformers.MODEL_FOR_MASKED_LM_MAPPING
    if type(config) not in masked or config.is_encoder_decoder or getattr(config, "is_decoder", False):
        return False
    mappings = (transformers.MODEL_MAPPING, masked, transformers.MODEL_FOR_PRETRAINING_MAPPING)
    return not config.architectures or any(_find_stated(mapping, config) for mapping in mappings)


def _find_stated(mapping: Any, config: Any) -> Any:
    """Return the class of a mapping that a configuration states, or None. Some configurations have several classes."""
    found = mapping.get(type(config), ())
    classes = found if isinstance(found, tuple) else (found,)
    return next((each for each in classes if each.__name__ in (config.architectures or ())), None)


def open_encoder(folder: Path, name: str, options: HFOptions) -> SourceModel:
    """Open a folder of an encoder, without loading weights."""
    home = find_transformer(folder)
    config = load_config(home, name, options)
    stored = index_weights(home, name)
    has_pooler = not stored or any("pooler." in key for key in stored)
    build = partial(_build_transformer, config, name, has_pooler=has_pooler)
    whole = build(options)
    refs, leftover = map_weights(stored, whole, name)
    if (dtype := replaced_float16(stored, refs, whole, options)) is not None:
        whole = build(replace(options, dtype=dtype))
    check_buffers(whole)
    encoder = whole.base_model
    (prefix,) = (f"{path}." if path else "" for path, module in whole.named_modules() if module is encoder)
    own = {key.removeprefix(prefix): ref for key, ref in refs.items() if key.startswith(prefix)}
    tensors = {f"encoder.{key}": ref for key, ref in bind_weights(encoder, name, own).items()}
    unknown = [key for key in leftover if not _UNUSED_HEADS.search(key)]
    check_unexpected_weights(name, unknown, "Use the checkpoint that belongs to the configuration.")
    pooling, layers, layer_tensors = _open_modules(folder, name, encoder.dtype)
    module = TextEncoder(encoder, pooling, layers).eval()
    facts = _read_text_facts(folder, home, name, module)
    tokenizer = partial(load_tokenizer, home, name, trust_remote_code=options.trust_remote_code)
    sizes, architecture = read_config_facts(encoder)
    return SourceModel(
        name=name,
        kind="huggingface",
        example=_make_example(module, config, sizes),
        tensors=tensors | layer_tensors,
        config_facts=sizes,
        architecture=architecture,
        max_sizes={"length": facts.max_length},
        load_tokenizer=tokenizer,
        encoder=facts,
    )


class TextEncoder(torch.nn.Module):
    """A stock encoder, the pooling of its last hidden states, and layers after it."""

    def __init__(self, encoder: Any, pooling: tuple[str, ...], layers: torch.nn.Sequential) -> None:
        super().__init__()
        self.encoder, self.pooling, self.layers = encoder, pooling, layers

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the embeddings of texts that are padded on the right."""
        types = {} if token_type_ids is None else {TOKEN_TYPES: token_type_ids}
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **types)[0]
        pooled = torch.cat([pool(mode, hidden, attention_mask) for mode in self.pooling], -1)
        return {EMBEDDINGS: self.layers(pooled)}


class Normalize(torch.nn.Module):
    """Scales embeddings to length 1."""

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the scaled embeddings."""
        return functional.normalize(embeddings, dim=-1)


_POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""Pooling modes in the order in which several are concatenated, and their flags in older files."""


def pool(mode: str, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Pool hidden states over the positions of a mask, which is padded on the right.

    >>> pool("mean", torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]]))
    tensor([[2.]])
    """
    if mode == "cls":
        return hidden[:, 0]
    if mode == "lasttoken":
        return hidden[torch.arange(hidden.shape[0]), mask.sum(1) - 1]
    if mode == "max":
        return hidden.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(1)
    weights = mask * torch.arange(1, mask.shape[1] + 1) if mode == "weightedmean" else mask
    weights = weights.unsqueeze(-1).to(torch.promote_types(hidden.dtype, torch.float32))
    count = weights.sum(1).clamp(min=1e-9)
    return ((hidden * weights).sum(1) / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)).to(hidden.dtype)


def _build_transformer(config: Any, name: str, options: HFOptions, *, has_pooler: bool) -> Any:
    """Build the class that the checkpoint states, whose head is not used, or else the encoder alone."""
    transformers = import_transformers()
    config.use_cache = config.get_text_config().use_cache = False
    auto = transformers.AutoModel
    if config.is_encoder_decoder:
        if type(config) not in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING:
            raise ModelError(
                f"transformers has no encoder alone for the {config.model_type} model {name}.",
                _REMEDY,
            )
        auto = transformers.AutoModelForTextEncoding
    heads = {
        transformers.AutoModelForMaskedLM: transformers.MODEL_FOR_MASKED_LM_MAPPING,
        transformers.AutoModelForPreTraining: transformers.MODEL_FOR_PRETRAINING_MAPPING,
        transformers.AutoModelForCausalLM: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    for each, mapping in heads.items():
        if _find_stated(mapping, config) and not config.is_encoder_decoder:
            auto = each
    more: dict[str, Any] = {} if options.dtype is None else {"dtype": options.dtype}
    alone = transformers.MODEL_MAPPING.get(type(config), None) if auto is transformers.AutoModel else None
    if isinstance(alone, type) and "add_pooling_layer" in inspect.signature(alone).parameters:
        more["add_pooling_layer"] = has_pooler
    try:
        with tracing_lock(), fake_parameters():
            model = auto.from_config(config, trust_remote_code=options.trust_remote_code, **more)
        model.tie_weights()
    except Exception as error:
        raise ModelError(
            f"transformers cannot build an encoder from the configuration of {name}: {one_line(error)}.",
            _REMEDY,
        ) from error
    return model.eval()


def _open_modules(
    folder: Path, name: str, dtype: torch.dtype
) -> tuple[tuple[str, ...], torch.nn.Sequential, dict[str, TensorRef]]:
    """Return the pooling and the layers after it, which `modules.json` lists, and the weights of the layers."""
    layers, tensors = torch.nn.Sequential(), dict[str, Any]()
    if not (folder / _MODULES).is_file():
        return ("mean",), layers, tensors
    rows = _read_modules(folder)
    kinds = [kind for kind, _ in rows]
    names = [kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind for kind in kinds]
    if names[:2] != ["Transformer", "Pooling"] or not {"Dense", "Normalize"}.issuperset(names[2:]):
        raise ModelError(
            f"{name} is made of the modules {', '.join(kinds)}, which is not supported.",
            f"Supported are Transformer and Pooling, and after them Dense and Normalize. {_REMEDY}",
        )
    pooling = _read_pooling(folder, folder / rows[1][1], name)
    for module, (_, path) in zip(names[2:], rows[2:], strict=True):
        home = folder / path
        settings = _read_json(home / "config.json", {})
        for key in ("module_input_name", "module_output_name"):
            _refuse(settings, key, (None, "sentence_embedding"), name)
        layer = Normalize() if module == "Normalize" else _build_dense(settings, home.name, dtype)
        if module == "Dense":
            refs = dict[str, Any](index_weights(home, name)) or {key: MissingTensor(key) for key in layer.state_dict()}
            bound = bind_weights(layer, f"{name}/{home.name}", refs)
            check_unexpected_weights(name, sorted(refs.keys() - bound.keys()), "Download the model again.")
            tensors |= {f"layers.{len(layers)}.{key}": ref for key, ref in bound.items()}
        layers.append(layer)
    return pooling, layers, tensors


def _read_pooling(folder: Path, home: Path, name: str) -> tuple[str, ...]:
    settings = _read_json(home / "config.json", {})
    flagged = [mode for mode, flag in _POOLING_FLAGS.items() if settings.get(flag)]
    stated = settings.get("pooling_mode") or flagged or "mean"
    modes = tuple(stated) if isinstance(stated, list) else (stated,)
    for mode in modes:
        if mode not in _POOLING_FLAGS:
            raise ModelError(f"{name} has the pooling mode {mode!r}, which is not supported.", _REMEDY)
    if any(_read_prompts(folder)[0].values()):
        _refuse(settings, "include_prompt", (None, True), name)
    return modes


def _build_dense(settings: Mapping[str, Any], name: str, dtype: torch.dtype) -> torch.nn.Module:
    _refuse(settings, "use_residual", (None, False), name)
    stated = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = getattr(torch.nn, stated.rpartition(".")[2], None) if stated.startswith("torch.nn.") else None
    if not (isinstance(activation, type) and issubclass(activation, torch.nn.Module)):
        raise ModelError(f"{name} has the activation {stated}, which is not a layer of torch.nn.", _REMEDY)
    try:
        with fake_parameters():
            linear = torch.nn.Linear(
                settings["in_features"], settings["out_features"], settings.get("bias", True), dtype=dtype
            )
        return torch.nn.Sequential(OrderedDict(linear=linear, activation=activation()))
    except (KeyError, TypeError) as error:
        raise ModelError(f"{name} is not a dense layer: {one_line(error)}.", "Download the model again.") from error


def _read_text_facts(folder: Path, home: Path, name: str, module: TextEncoder) -> EncoderFacts:
    """Read how texts become tokens, from the files of sentence-transformers and of the tokenizer."""
    files = [home / "sentence_bert_config.json", *sorted(home.glob("sentence_*_config.json"))]
    text: dict[str, Any] = next((_read_json(file, {}) for file in files if file.is_file()), {})
    _refuse(text, "transformer_task", (None, "feature-extraction"), name)
    _refuse(text, "module_output_name", (None, "token_embeddings"), name)
    for key in filter(_ARGUMENTS.fullmatch, text):
        _refuse(text, key, (None, {}, {"add_pooling_layer": False}), name)
    tokenizer = _read_json(home / "tokenizer_config.json", {})
    stated = text.get("max_seq_length") or tokenizer.get("model_max_length") or _UNLIMITED
    side = tokenizer.get("truncation_side", "right")
    if not isinstance(stated, int | float) or not stated >= 1 or side not in ("left", "right"):
        problem = f"{name} truncates texts to {printable(str(stated))} tokens on the {printable(str(side))} side."
        raise ModelError(problem, "Correct max_seq_length, model_max_length or truncation_side.")
    length = int(min(stated, _count_positions(module.encoder) or stated))
    config = module.encoder.config.get_text_config()
    prompts, default = _read_prompts(folder)
    return EncoderFacts(
        max_length=length if length < 1 << 24 else _UNLIMITED,
        pooling=module.pooling,
        normalized=any(isinstance(layer, Normalize) for layer in module.layers),
        pad_token=config.pad_token_id if isinstance(config.pad_token_id, int) and config.pad_token_id >= 0 else 0,
        lowercase=bool(text.get("do_lower_case")),
        truncation_side=side,
        prompts=prompts,
        default_prompt=default,
    )


def _count_positions(encoder: Any) -> int | None:
    """Return how many positions an encoder has. A table with a padding row has usable rows only after that row."""
    stated = getattr(encoder.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        return None
    words = encoder.get_input_embeddings()
    tables = [each for each in encoder.modules() if isinstance(each, torch.nn.Embedding) and each is not words]
    offsets = [
        each.padding_idx + 1 for each in tables if each.num_embeddings == stated and each.padding_idx is not None
    ]
    return stated - max(offsets, default=0)


def _read_prompts(folder: Path) -> tuple[dict[str, str], str]:
    """Return the prompts of a folder of sentence-transformers by name, and the name of the default."""
    stated = _read_json(folder / "config_sentence_transformers.json", {})
    given = stated.get("prompts") or {}
    if not isinstance(given, dict):
        raise ModelError("The prompts of config_sentence_transformers.json have no names.", "Download the model again.")
    prompts = {str(key): str(value) for key, value in given.items() if value is not None}
    default = str(stated.get("default_prompt_name") or "")
    return prompts, default if default in prompts else ""


def _make_example(module: TextEncoder, config: Any, sizes: Mapping[str, int]) -> Example:
    ids = (torch.arange(16) % max(1, sizes.get("vocabulary", 1))).reshape(2, 8)
    names = [TOKENS, MASK]
    has_types = TOKEN_TYPES in inspect.signature(module.encoder.forward).parameters
    if has_types and (getattr(config, "type_vocab_size", None) or 0) > 1:  # with a single type, it is the default
        names.append(TOKEN_TYPES)
    values = {TOKENS: ids, MASK: torch.ones_like(ids), TOKEN_TYPES: torch.zeros_like(ids)}
    axes = {0: "batch", 1: "length"}
    return Example(module, (), {name: values[name] for name in names}, dict.fromkeys(names, axes))


def _refuse(settings: Mapping[str, Any], key: str, supported: tuple[Any, ...], where: str) -> None:
    if settings.get(key) not in supported:
        raise ModelError(
            f"{where} has the setting {key} = {settings[key]!r}, which is not supported.",
            _REMEDY,
        )


def _read_json(file: Path, default: Any) -> Any:
    """Return the content of a file, or the default if there is none; both are of the same type."""
    if not file.is_file():
        return default
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read: {one_line(error)}.", "Download the model again.") from error
    if not isinstance(found, type(default)):
        raise ModelError(f"{file.name} has an unexpected structure.", "Download the model again.")
    return found
