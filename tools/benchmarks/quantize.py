"""Quantize a GGUF file with llama.cpp: `PEERS/bin/python tools/benchmarks/quantize.py MODEL.gguf OUT.gguf Q4_K_M`.

MODEL may be quantized; then its values are quantized again. The types are those of llama.cpp's `llama-quantize`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import llama_cpp as lib

PREFIX = "LLAMA_FTYPE_MOSTLY_"


def main() -> None:
    """Write OUT."""
    types = {name.removeprefix(PREFIX): getattr(lib, name) for name in dir(lib) if name.startswith(PREFIX)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("type", choices=sorted(types))
    given = parser.parse_args()
    settings = lib.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = types[given.type], True
    if lib.llama_model_quantize(str(given.model).encode(), str(given.out).encode(), settings):
        raise SystemExit(f"llama.cpp cannot quantize {given.model}.")
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
