"""Checkpoints of any size with random weights, written tensor by tensor: no more than one is ever held."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def llama_checkpoint(folder: Path, **fields: Any) -> int:
    """A Hugging Face folder of a Llama in float32; how many bytes its weights have."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "float32",
    } | fields
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = dict(_shapes(config))
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + 4 * math.prod(shape)]}
        at += 4 * math.prod(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            if len(shape) == 1:
                out.write(np.ones(shape, np.float32).tobytes())
            else:
                for _ in range(shape[0]):
                    out.write((random.random(shape[1], np.float32) - 0.5).tobytes())
    return at


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shared = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (rows, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (shared, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (shared, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (rows, hidden)
