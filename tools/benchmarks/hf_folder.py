"""Convert a GGUF file to a dequantized Hugging Face folder: python -m tools.benchmarks.hf_folder MODEL.gguf FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def open_hf(path: Path, dtype: torch.dtype) -> Any:
    """Load a GGUF file or a folder as a dequantized transformers model."""
    if path.is_file():
        found = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    else:
        found = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return found.eval()


def main(model: Path, folder: Path) -> None:
    """Write float32 weights and the tokenizer."""
    plain = open_hf(model, torch.float32)
    plain.hf_quantizer = None  # the model was dequantized on load and can be saved
    del plain.config.quantization_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m tools.benchmarks.hf_folder MODEL.gguf FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
