"""Small models for tests, and factories for `package.module:factory`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inlay import Example

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Branch(torch.nn.Module):
    """State written in place, a branch with nested graphs, constants, keyword arguments, several outputs."""

    count: torch.Tensor
    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("offset", torch.tensor([0.0, float("inf"), -1.5, 1e-30]), persistent=False)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
        self.count.add_(1)
        cache.index_copy_(0, torch.tensor([1]), x[:1])

        def positive(value: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(value, self.weight) + torch.clamp(self.offset, max=9.0)

        def negative(value: torch.Tensor) -> torch.Tensor:
            return torch.softmax(value, dim=-1, dtype=torch.float64).to(torch.float32)

        branched = torch.cond(x.sum() > 0, positive, negative, (x,))
        return {"branched": branched, "rest": (x.masked_fill(x > 0, float("-inf")), x.flatten())}


def branch() -> Example:
    return Example(Branch(), (torch.ones(3, 4), torch.zeros(5, 4)), axes={"x": {0: "batch"}})


class Convolutions(torch.nn.Module):
    """A small non-LLM model: residual 1-d convolutions over audio frames."""

    def __init__(self, layers: int = 5, channels: int = 8) -> None:
        super().__init__()
        self.into = torch.nn.Conv1d(1, channels, 5, padding=2)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Conv1d(channels, channels, 3, padding=1),
                torch.nn.GELU(),
                torch.nn.Conv1d(channels, channels, 1),
            )
            for _ in range(layers)
        )
        self.out = torch.nn.Conv1d(channels, 1, 1)

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        hidden = self.into(audio)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.out(hidden)


def convolutions() -> Example:
    torch.manual_seed(0)
    return Example(Convolutions(), (torch.randn(2, 1, 64),), axes={"audio": {0: "batch", 2: "frames"}})


def as_tuple() -> tuple[Any, ...]:
    return Convolutions(), torch.randn(2, 1, 64)


def raises() -> None:
    raise RuntimeError("the factory is broken")


def not_a_model() -> int:
    return 3


class DataDependent(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else -x


def data_dependent() -> Example:
    return Example(DataDependent(), (torch.ones(3),))


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


SEVENTY_BILLION: dict[str, Any] = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def config_folder(folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder with a configuration and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def random_model(config: dict[str, Any], seed: int = 0) -> Any:
    """A stock model with random weights; a whole multimodal model if its configuration has a part for text."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    torch.manual_seed(seed)
    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    cls = AutoModelForMultimodalLM if "text_config" in config else AutoModelForCausalLM
    return cls.from_config(AutoConfig.for_model(config["model_type"], **fields)).eval()


def llama_folder(folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder with random weights."""
    random_model(LLAMA | changes).save_pretrained(folder)
    return folder


def tiny_gguf(
    path: Path,
    layers: int = 2,
    seed: int = 0,
    inner: int = 96,
    more: Callable[[Any], None] = lambda writer: None,
    **kinds: str,
) -> Path:
    """A GGUF file of a small Llama with random weights: Q4_1, a Q8_0 embedding, and tensors of other kinds by name.

    A name is of all layers (`attn_v`) or of one (`blk.0.attn_v`). `more` adds to the file what it needs beside.
    """
    import gguf

    rng = np.random.default_rng(seed)
    hidden, heads, kv_heads, vocabulary = 64, 4, 2, 96
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(vocabulary)])
    writer.add_token_types([1] * vocabulary)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * 0.1
        kind = gguf.GGMLQuantizationType[kinds.get(name[:-7], kinds.get(name.split(".")[-2], kind.name))]
        raw = random_k_blocks(values.shape, kind.name, rng) if kind.name[-2:] == "_K" else gguf.quantize(values, kind)
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=kind)

    q4, q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    add("token_embd.weight", vocabulary, hidden, kind=q8)
    add("output_norm.weight", hidden)
    for layer in range(layers):
        prefix = f"blk.{layer}"
        add(f"{prefix}.attn_norm.weight", hidden)
        add(f"{prefix}.ffn_norm.weight", hidden)
        add(f"{prefix}.attn_q.weight", hidden, hidden, kind=q4)
        add(f"{prefix}.attn_k.weight", hidden // 2, hidden, kind=q4)
        add(f"{prefix}.attn_v.weight", hidden // 2, hidden, kind=q4)
        add(f"{prefix}.attn_output.weight", hidden, hidden, kind=q4)
        add(f"{prefix}.ffn_gate.weight", inner, hidden, kind=q4)
        add(f"{prefix}.ffn_up.weight", inner, hidden, kind=q4)
        add(f"{prefix}.ffn_down.weight", hidden, inner, kind=q4)
    more(writer)
    finish_gguf(writer)
    return path


def copy_metadata(reader: Any, writer: Any) -> None:
    """Add the metadata of a GGUF file to a writer of the same architecture."""
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), *field.types[:2])


def finish_gguf(writer: Any) -> None:
    """Write what was added to a writer."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_k_blocks(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Random blocks of Q4_K, Q5_K or Q6_K, with values up to 0.3: the gguf package only reads these formats."""
    size = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
    blocks = rng.integers(0, 256, (math.prod(shape) // 256, size), dtype=np.uint8)
    scale = rng.uniform(0.5, 1.5, (len(blocks), 1)) * 1e-3
    if kind == "Q6_K":
        blocks[:, 192:208] = rng.integers(-8, 8, (len(blocks), 16), dtype=np.int8).view(np.uint8)
        blocks[:, 208:] = scale.astype(np.float16).view(np.uint8)
    else:  # minima of half the range, with other factors
        steps = {"Q4_K": 16, "Q5_K": 32}[kind]
        factors = np.hstack([scale * 4 / steps, scale * 2]).astype(np.float16)
        blocks[:, :4] = factors.view(np.uint8)
    return blocks.reshape(shape[0], -1)
