"""Measure what watching costs: `python -m tools.benchmarks.watch_overhead`, on an idle machine.

A random Llama is compiled by Inductor, with its caches off, with and without `inlay.watch_patterns()`. Rounds are
interleaved. Seconds are CPU time, with that of the C++ compiler. The output is the median of the ratios per round, and
their range.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import inlay


def compile_once(model: Any, watched: bool) -> tuple[float, int]:
    """Return the CPU seconds of one compilation, and how many passes were recorded."""
    torch.compiler.reset()
    ids = torch.arange(16)[None]
    context: Any = inlay.watch_patterns() if watched else nullcontext([])
    begin = sum(os.times()[:4])
    with torch.no_grad(), context as records:
        torch.compile(model)(input_ids=ids, use_cache=False)
    return sum(os.times()[:4]) - begin, len(records)


def main() -> None:
    """Print the ratio of watched to plain compilations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.compiler.config.force_disable_caches = True
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=given.layers, vocab_size=512)
    model = AutoModelForCausalLM.from_config(config).eval()
    for watched in (False, True):
        compile_once(model, watched)
    ratios = []
    for index in range(given.rounds):
        order = (False, True) if index % 2 else (True, False)
        found = {watched: compile_once(model, watched) for watched in order}
        (plain, _), (seconds, passes) = found[False], found[True]
        ratios.append(seconds / plain)
        print(f"plain {plain:.1f} s, watched {seconds:.1f} s ({passes} passes recorded): {ratios[-1]:.3f}", flush=True)
    print(f"watched ÷ plain: {median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f})")


if __name__ == "__main__":
    main()
