"""Small text encoders: stock architectures with random weights, bare or as sentence-transformers stores them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "paris", "is", "a", "city")
POSITIONS = 40
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0},
    "xlm-roberta": {"type_vocab_size": 1},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "mpnet": {},
}
"""Model type → settings beside `SIZES`."""


def random_encoder(model_type: str, **changes: Any) -> Any:
    """The stock encoder of an architecture with random weights."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    settings = {**SIZES, "bos_token_id": 2, "eos_token_id": 3, **ENCODERS.get(model_type, {}), **changes}
    return AutoModel.from_config(AutoConfig.for_model(model_type, **settings)).eval()


def save_tokenizer(folder: Path, **settings: Any) -> None:
    """A tokenizer of whole words, case sensitive, with a token before and one after every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokens = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({token: row for row, token in enumerate(tokens)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **settings).save_pretrained(folder)


def encoder_folder(folder: Path, model: Any, **tokenizer: Any) -> Path:
    """A folder of a bare encoder."""
    model.save_pretrained(folder)
    save_tokenizer(folder, **tokenizer)
    return folder


def sentence_folder(
    folder: Path,
    model: Any,
    *,
    pooling: dict[str, Any],
    modules: Sequence[str] = ("Normalize",),
    text: dict[str, Any] | None = None,
    prompts: dict[str, Any] | None = None,
) -> Path:
    """A folder as sentence-transformers writes it: modules, pooling, and settings of texts."""
    encoder_folder(folder, model)
    kinds = ["Transformer", "Pooling", *modules]
    rows = [
        {"idx": row, "path": f"{row}_{kind}" if row else "", "type": f"sentence_transformers.models.{kind}"}
        for row, kind in enumerate(kinds)
    ]
    for row in rows:
        (folder / str(row["path"])).mkdir(exist_ok=True)
    _write(folder / "modules.json", rows)
    _write(folder / "1_Pooling" / "config.json", pooling)
    _write(folder / "sentence_bert_config.json", text or {})
    _write(folder / "config_sentence_transformers.json", prompts or {})
    return folder


def dense_folder(folder: Path, layer: torch.nn.Linear, activation: str) -> None:
    """The files of a dense layer in a folder of sentence-transformers."""
    from safetensors.torch import save_file

    settings = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
    _write(folder / "config.json", {**settings, "activation_function": activation})
    save_file(
        {f"linear.{name}": value.detach() for name, value in layer.named_parameters()}, folder / "model.safetensors"
    )


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))
