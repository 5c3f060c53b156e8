"""Measure the time of cold builds, and the ratio of 120 to 30 layers of the same width with random weights.

    python -m tools.benchmarks.build_scale [--model MODEL] [--rounds 1]

Every build runs in a new process with an empty compiler cache. --model also times a cold build of that model.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from tests.package.random_checkpoint import llama_checkpoint

from inlay.bench.metrics import Spread, ratio
from tools.benchmarks.fresh import run

BUILD = """
import json, sys
from inlay.flow import BuildOptions, build
made = build(sys.argv[1], sys.argv[2], BuildOptions(max_length=256, use_cache=False))
print(json.dumps(dict(made.seconds)))
"""
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
DEPTHS = 30, 120


def build_seconds(model: str) -> float:
    """Return the seconds of a cold build, from process start to exit."""
    with tempfile.TemporaryDirectory() as folder:
        kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
        start = time.perf_counter()
        try:
            run(BUILD, model, Path(folder, "package"))
        finally:
            if kept is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = kept
        return time.perf_counter() - start


def main() -> None:
    """Print seconds and the ratio, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="also time a cold build of this model")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    took: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as home:
        models = {f"layers_{depth}": str(Path(home, str(depth))) for depth in DEPTHS}
        for depth, folder in zip(DEPTHS, models.values(), strict=True):
            llama_checkpoint(Path(folder), **SHAPE, num_hidden_layers=depth)
        if given.model:
            models["model"] = given.model
        for _ in range(given.rounds):
            for name, model in models.items():
                took.setdefault(f"{name}_s", []).append(build_seconds(model))
    times = ratio(took[f"layers_{DEPTHS[1]}_s"], took[f"layers_{DEPTHS[0]}_s"])
    found = {name: Spread.of(seconds).to_json() for name, seconds in took.items()}
    print(json.dumps(found | {"ratio": times.to_json() if times else None}, indent=2))


if __name__ == "__main__":
    main()
