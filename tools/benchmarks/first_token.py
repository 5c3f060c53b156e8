"""Measure the time from process start to the first token, relative to `import torch` and mapping the weights.

    python -m tools.benchmarks.first_token PACKAGE [--rounds 5]

Both are whole processes including the interpreter, and runs are interleaved. Mapping reads no data; pages are loaded on
first use.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from inlay.bench.metrics import Spread, ratio
from tools.benchmarks.fresh import run

FLOOR = """
import sys, torch
weights = torch.UntypedStorage.from_file(sys.argv[1], shared=False, nbytes=int(sys.argv[2]))
print(0)
"""
FIRST = """
import sys
from inlay.runtime import load
print(int(load(sys.argv[1]).open().advance([1]).argmax()))
"""


def main() -> None:
    """Print both times and their ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("package", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    weights = given.package / "current" / "weights.safetensors"
    run(FIRST, given.package)  # the very first load hashes the weights
    floors, firsts = [], []
    for _ in range(given.rounds):
        floors.append(run(FLOOR, weights, str(weights.stat().st_size))[1])
        firsts.append(run(FIRST, given.package)[1])
    times = ratio(firsts, floors)
    found = {"first_token_s": Spread.of(firsts), "import_and_map_s": Spread.of(floors), "ratio": times}
    print(json.dumps({name: each.to_json() for name, each in found.items() if each}, indent=2))


if __name__ == "__main__":
    main()
