"""Measure the memory of running a package, relative to its stored weights and its KV cache.

    python -m tools.benchmarks.resident PACKAGE [--prompt 512] [--tokens 64]

The growth of a new process is measured from after `import torch` to its peak, including pages of the mapped weights;
every weight has been read by then. Only the filled part of the cache counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tools.benchmarks.fresh import run

GROW = """
import json, sys, torch

def resident(kind):
    with open("/proc/self/status") as file:
        rows = dict(line.split(":", 1) for line in file)
    return int(rows[kind].split()[0]) << 10

package, prompt, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
before = resident("VmRSS")
from inlay.package.loader import load_package
from inlay.runtime import Session
loaded = load_package(package)
session = Session(loaded)
prompt = min(prompt, session.max_seq_len - tokens)
session.advance([[1] * prompt])
for _ in range(tokens):
    session.advance([[1]])
for weight in loaded.weights.values():
    weight.view(torch.uint8).max() if weight.dim() else weight.max()
state = [row for row in loaded.bindings.state]
filled = sum(row.nbytes * (prompt + tokens) // (row.shape[0] * row.shape[2]) for row in state)
print(json.dumps({
    "import_torch_bytes": before,
    "growth_bytes": resident("VmHWM") - before,
    "weights_bytes": loaded.manifest.weights_file.size,
    "filled_cache_bytes": filled,
    "cache_bytes": sum(row.nbytes for row in state),
}))
"""


def main() -> None:
    """Print bytes and the ratio, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("package", type=Path)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    found, _ = run(GROW, given.package, str(given.prompt), str(given.tokens))
    found["ratio"] = found["growth_bytes"] / (found["weights_bytes"] + found["filled_cache_bytes"])
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
