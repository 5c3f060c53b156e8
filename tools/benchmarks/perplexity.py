"""Measure the accuracy of number formats: perplexity of packages and of the float32 model on the same text.

    python -m tools.benchmarks.perplexity MODEL_OR_PACKAGE... [--tokenizer PACKAGE] [--tokens 5120] [--against PEERS]

The text is an excerpt of Python's `pydoc_data.topics`, checked by its hash. It is split into windows of 512 tokens.
Each window starts with an empty cache and is scored from its second token on. A model (GGUF file or Hugging Face
folder) is dequantized to float32 and run by transformers; a package computes one token at a time. With `--against`,
llama.cpp computes the GGUF files too (`tools/benchmarks/peers.sh PEERS`), each window at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING, Any

import torch

from inlay.bench.worker import Contestant, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

LLAMA_CPP = Path(__file__).parent / "contestants" / "peers" / "llama_cpp.py"
WINDOW = 512
NAMES = ("assignment", "atom-literals", "booleans", "class", "comparisons", "compound", "execmodel", "exprlists")
SHA256 = "46e4715c35c7c396018d791ace86b96173d100dba32931b0fcd226bb5250fd8e"


def text() -> str:
    """Return the excerpt; raise if this Python has another text, because results would not be comparable."""
    found = "\n".join(topics.topics[name] for name in NAMES)
    if hashlib.sha256(found.encode()).hexdigest() != SHA256:
        raise SystemExit("pydoc_data.topics of this Python has another text. Use Python 3.11.7.")
    return found


def windows(tokens: list[int], count: int) -> list[list[int]]:
    """Return whole windows with at most `count` tokens in total."""
    if len(tokens) < count:
        raise SystemExit(f"The text has {len(tokens)} tokens, but {count} were requested.")
    return [tokens[at : at + WINDOW] for at in range(0, count - WINDOW + 1, WINDOW)]


def package_losses(path: Path, given: list[list[int]]) -> Iterator[float]:
    """Yield the negative log probability of each scored token, from a package."""
    from inlay.package.loader import load_package
    from inlay.runtime import Session

    session = Session(load_package(path))
    for window in given:
        session.restart()
        for token, wanted in pairwise(window):
            yield -float(torch.log_softmax(session.advance([[token]])[0], dim=-1)[wanted])


def model_losses(path: Path, given: list[list[int]]) -> Iterator[float]:
    """Yield the negative log probability of each scored token, from the float32 model."""
    from tools.benchmarks.hf_folder import open_hf

    model = open_hf(path, torch.float32)
    for window in given:
        with torch.inference_mode():
            scores = model(torch.tensor([window])).logits[0, :-1].float()
        losses: Any = torch.nn.functional.cross_entropy(scores, torch.tensor(window[1:]), reduction="none")
        yield from losses.tolist()


def llama_cpp_losses(peers: Path, path: Path, given: list[list[int]]) -> Iterator[float]:
    """Yield the negative log probability of each scored token, from llama.cpp with a GGUF file."""
    arguments = {"model": str(path.resolve()), "threads": torch.get_num_threads()}
    worker = Worker(Contestant("llama.cpp", LLAMA_CPP.resolve(), peers.absolute() / "bin" / "python", arguments))
    for window in given:
        yield from worker.call("losses", tokens=window)
    worker.close()


def is_package(path: Path) -> bool:
    """Return whether `inlay build` wrote this folder."""
    return (path / "current").exists()


def main() -> None:
    """Print one perplexity per line, and its difference from the first model that is not a package."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("paths", nargs="+", type=Path, metavar="MODEL_OR_PACKAGE")
    parser.add_argument("--tokenizer", type=Path, help="package whose tokenizer is used (default: the first package)")
    parser.add_argument("--tokens", type=int, default=10 * WINDOW)
    parser.add_argument("--against", type=Path, metavar="PEERS")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    home = given.tokenizer or next((path for path in given.paths if is_package(path)), None)
    if home is None:
        raise SystemExit("No package with a tokenizer was given. Name one with --tokenizer.")
    from inlay.runtime import load

    cut = windows(load(home).text.encode(text()), given.tokens)
    found: dict[str, float] = {}
    measured = [(str(path), package_losses if is_package(path) else model_losses, path) for path in given.paths]
    if given.against:
        by_llama = partial(llama_cpp_losses, given.against)
        measured += [(f"llama.cpp {path}", by_llama, path) for path in given.paths if path.is_file()]
    for name, compute, path in measured:
        losses = list(compute(path, cut))
        found[name] = math.exp(math.fsum(losses) / len(losses))
        if not given.json:
            reference = next(
                (found[str(each)] for each in given.paths if str(each) in found and not is_package(each)), 0
            )
            more = f"  {100 * (found[name] / reference - 1):+.2f} %" if reference else ""
            print(f"{found[name]:8.4f}{more}  {name} ({len(losses)} tokens)", flush=True)
    if given.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
