"""Compare a text encoder with others: `python -m tools.benchmarks.embeddings PACKAGE --model FOLDER [--against PEERS]`.

FOLDER is the model that PACKAGE was built from. All contestants get the same batches of token ids, sorted by length and
padded to the longest text of the batch; tokenization is not measured. transformers and torch.compile run in Inlay's
environment, OpenVINO and onnxruntime in PEERS (`pip install torch==2.13.0 transformers openvino onnxruntime onnx
onnxscript`). In each round all contestants compute all batches, in a rotating order. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import inlay
from inlay.api import SAMPLE_TEXT
from inlay.bench.worker import Contestant, UnavailableError, Worker
from inlay.package.loader import read_manifest
from inlay.program.bindings import Role
from inlay.program.encoder import MASK, TOKEN_TYPES, TOKENS
from tools.benchmarks.serving import spread

if TYPE_CHECKING:
    from tokenizers import Encoding

SCRIPT = Path(__file__).with_name("embedding_contestant.py")
OWN, PEERS = ("inlay", "transformers", "compiled"), ("openvino", "onnxruntime")


def sentences(count: int) -> list[str]:
    """Return sentences of the sample text, joined in threes and sixes for longer texts; repeated if there are few."""
    found = [each for each in re.split(r"(?<=[.!?])\s+", SAMPLE_TEXT.read_text("utf-8")) if each.strip()]
    mixed = [" ".join(found[place : place + (1, 1, 3, 6)[place % 4]]) for place in range(len(found))]
    return [mixed[place % len(mixed)] for place in range(count)]


def save_batches(package: Path, texts: list[str], size: int, file: Path) -> int:
    """Write token batches; return how many tokens they have, without padding."""
    manifest, _ = read_manifest(package)
    facts, encoder = manifest.encoder, inlay.load_encoder(package)
    if facts is None or (facts.pooling, facts.normalized) != (("mean",), True):
        raise SystemExit("The benchmark compares encoders with mean pooling and normalization.")
    wanted = {row.target for row in manifest.bindings.with_role(Role.INPUT)}
    encodings = sorted(encoder.encode(texts), key=lambda each: -len(each.ids))
    parts = [encodings[start : start + size] for start in range(0, len(encodings), size)]
    held: dict[str, np.ndarray] = {"count": np.array(len(parts))}
    for place, part in enumerate(parts):
        given = {TOKENS: pad(part, "ids", facts.pad_token), MASK: pad(part, "attention_mask")}
        given |= {TOKEN_TYPES: pad(part, "type_ids")}
        held |= {f"{place}:{name}": value for name, value in given.items() if name in wanted}
    np.savez(file, **held)  # type: ignore[arg-type]
    return sum(len(each.ids) for each in encodings)


def pad(part: list[Encoding], field: str, value: int = 0) -> np.ndarray:
    """Return the rows of a batch, padded to the longest."""
    longest = len(part[0].ids)
    return np.array([[*getattr(each, field), *[value] * (longest - len(each.ids))] for each in part], np.int64)


def open_workers(asked: argparse.Namespace, batches: Path) -> dict[str, Worker]:
    """Start the contestants; one that cannot run is left out, with a note."""
    pythons = dict.fromkeys(OWN, Path(sys.executable))
    pythons |= dict.fromkeys(PEERS, asked.against.absolute() / "bin" / "python") if asked.against else {}
    shared = {"threads": asked.threads, "batches": str(batches), "model": str(asked.model.resolve())}
    shared |= {"package": str(asked.package.resolve())}
    found = {}
    for name, python in pythons.items():
        if name == "inlay" or not asked.contestants or name in asked.contestants:
            try:
                found[name] = Worker(Contestant(name, SCRIPT.resolve(), python, {**shared, "variant": name}))
                print(f"{name}: {found[name].version}", file=sys.stderr)
            except UnavailableError as error:
                print(error, file=sys.stderr)
    return found


def main() -> None:
    """Run the rounds and print JSON. Exit code 1 if the embeddings of two contestants differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--against", type=Path, metavar="PEERS")
    parser.add_argument("--contestants", nargs="*", choices=(*OWN, *PEERS))
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        batches = Path(folder) / "batches.npz"
        tokens = save_batches(asked.package, sentences(asked.sentences), asked.batch, batches)
        workers = open_workers(asked, batches)
        if "inlay" not in workers:
            raise SystemExit("The package cannot be measured.")
        values = {name: np.array(worker.call("values")) for name, worker in workers.items()}
        speeds: dict[str, list[float]] = {name: [] for name in workers}
        names = list(workers)
        for number in range(asked.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                speeds[name].append(asked.sentences / sum(workers[name].call("embed")))
                workers[name].wait_idle()
            print(f"round {number}: {', '.join(f'{name} {speeds[name][-1]:.1f}' for name in names)}", file=sys.stderr)
        for worker in workers.values():
            worker.close()
    others = [name for name in names if name != "inlay"]
    differences = {name: float(np.abs(values[name] - values["inlay"]).max()) for name in others}
    ratios = {
        name: spread([own / other for own, other in zip(speeds["inlay"], speeds[name], strict=True)]) for name in others
    }
    result = {"sentences": asked.sentences, "tokens": tokens, "batch": asked.batch, "threads": asked.threads}
    result |= {"sentences_per_s": {name: spread(found) for name, found in speeds.items()}}
    print(json.dumps(result | {"inlay_over": ratios, "largest_difference": differences}, indent=1))
    raise SystemExit(1 if any(each > 1e-3 for each in differences.values()) else 0)


if __name__ == "__main__":
    main()
