"""Write a Llama of any shape with random weights as a GGUF file: Q4_1 weights, and a Q8_0 embedding shared by the head.

    python -m tools.benchmarks.random_llama FILE.gguf [--layers 16] [--hidden 2048] [--float16] ...

The default shape is that of Llama-3.2-1B. Inlay and llama.cpp read the same file. It is as fast as a model with real
weights; its output is noise. `--float16` writes float16 weights, which `quantize.py` can quantize.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

GROUP = 32
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


@dataclass(frozen=True)
class Shape:
    """The size of the model."""

    layers: int = 16
    hidden: int = 2048
    inner: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    length: int = 8192


def q4_1(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Return Q4_1 blocks of 32 values: a scale, a minimum, and four random bits per value, with mean 0."""
    blocks = rows * columns // GROUP
    scale = 0.2 / np.sqrt(columns)
    made = np.empty((blocks, 20), np.uint8)
    made[:, :2] = np.full((blocks, 1), scale, np.float16).view(np.uint8)
    made[:, 2:4] = np.full((blocks, 1), -7.5 * scale, np.float16).view(np.uint8)
    made[:, 4:] = random.integers(0, 256, (blocks, 16), np.uint8)
    return made.reshape(rows, -1)


def q8_0(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Return Q8_0 blocks of 32 values: a scale, and eight random bits per value."""
    blocks = rows * columns // GROUP
    made = np.empty((blocks, 34), np.uint8)
    made[:, :2] = np.full((blocks, 1), 0.0002, np.float16).view(np.uint8)
    made[:, 2:] = random.integers(-127, 128, (blocks, 32), np.int8).view(np.uint8)
    return made.reshape(rows, -1)


def float16(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Return normally distributed values."""
    return (random.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))).astype(np.float16)


def write(path: Path, shape: Shape, *, plain: bool = False) -> None:
    """Write the file; `plain`: in float16."""
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    _describe(writer, shape)
    random = np.random.default_rng(0)
    shared = shape.hidden // shape.heads * shape.kv_heads

    def blocks(name: str, rows: int, columns: int) -> None:
        if plain:
            writer.add_tensor(f"{name}.weight", float16(random, rows, columns))
        else:
            writer.add_tensor(f"{name}.weight", q4_1(random, rows, columns), raw_dtype=Q4_1)

    def ones(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape.hidden, np.float32))

    if plain:
        blocks("token_embd", shape.vocabulary, shape.hidden)
    else:
        writer.add_tensor("token_embd.weight", q8_0(random, shape.vocabulary, shape.hidden), raw_dtype=Q8_0)
    ones("output_norm")
    for layer in range(shape.layers):
        prefix = f"blk.{layer}"
        ones(f"{prefix}.attn_norm")
        ones(f"{prefix}.ffn_norm")
        blocks(f"{prefix}.attn_q", shape.hidden, shape.hidden)
        blocks(f"{prefix}.attn_k", shared, shape.hidden)
        blocks(f"{prefix}.attn_v", shared, shape.hidden)
        blocks(f"{prefix}.attn_output", shape.hidden, shape.hidden)
        blocks(f"{prefix}.ffn_gate", shape.inner, shape.hidden)
        blocks(f"{prefix}.ffn_up", shape.inner, shape.hidden)
        blocks(f"{prefix}.ffn_down", shape.hidden, shape.inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Add the configuration and a tokenizer that llama.cpp can load."""
    writer.add_name(f"random llama, {shape.layers} layers of {shape.hidden}")
    writer.add_context_length(shape.length)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_vocab_size(shape.vocabulary)
    letters = [chr(each) for each in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    words = [f"Ġ{number}" for number in range(shape.vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list((letters + words)[: shape.vocabulary])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * shape.vocabulary)
    writer.add_token_merges([f"Ġ {number}" for number in range(10)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def main() -> None:
    """Write a file of the requested shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("path", type=Path, metavar="FILE.gguf")
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--float16", action="store_true")
    given = vars(parser.parse_args())
    path, plain = given.pop("path"), given.pop("float16")
    write(path, Shape(**given), plain=plain)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
