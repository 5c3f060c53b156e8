"""Damaged files: every one either reads or is refused with a sentence; nothing crashes, hangs or grows."""

from __future__ import annotations

import random
import resource
import time
from typing import TYPE_CHECKING, Any

import gguf
import pytest

from inlay.errors import ModelError
from inlay.frontend import open_model
from tests.models import llama_folder, tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

PLACES = 500
SECONDS_EACH = 20
"""Of this process, whatever else the machine does."""


def _damage_and_open(path: Path, model: Path, header: int) -> tuple[int, int]:
    """Truncate and flip bits in turn, mostly in the header, where all the structure is; returns refused, read."""
    whole = path.read_bytes()
    rng = random.Random(0)
    sentences: list[str] = []
    read = 0
    for place in range(PLACES):
        damaged = bytearray(whole)
        if place % 2:
            damaged = damaged[: rng.randrange(len(whole))]
        else:
            at = rng.randrange(header) if place % 8 else rng.randrange(len(whole))
            damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        start = time.process_time()
        try:
            opened = open_model(str(model))
            for ref in opened.tensors.values():
                ref.read()
            read += 1
        except ModelError as error:
            sentences.append(str(error))
        assert time.process_time() - start < SECONDS_EACH
    path.write_bytes(whole)
    open_model(str(model))
    for sentence in sentences:
        assert "\n" not in sentence
        assert sentence.endswith("."), sentence
    return len(sentences), read


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_damaged_weights(kind: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path, model, header = _gguf(tmp_path) if kind == "gguf" else _safetensors(tmp_path)
    refused, read = _damage_and_open(path, model, header)
    assert refused >= PLACES // 2, "a truncated file is always refused"
    assert read, "a flip in a weight or in a token is not detectable: the formats carry no checksum"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1_500_000, f"{grown} KiB more than before"


def _gguf(folder: Path) -> tuple[Path, Path, int]:
    from inlay.frontend.gguf.reader import read_header

    path = tiny_gguf(folder / "tiny.gguf")
    header = min(info.offset for info in read_header(path).tensors.values())
    return path, path, header


def _safetensors(folder: Path) -> tuple[Path, Path, int]:
    llama_folder(folder)
    path = folder / "model.safetensors"
    return path, folder, int.from_bytes(path.read_bytes()[:8], "little") + 8


def test_blocks_that_do_not_fit(tmp_path: Path) -> None:
    """Rows of 64 values cannot be blocks of 256; and a file that ends within blocks."""
    kinds: dict[str, Any] = {"ffn_down": "Q4_K"}
    path = tiny_gguf(tmp_path / "tiny.gguf", inner=256, **kinds)
    whole, name = path.read_bytes(), b"blk.0.ffn_gate.weight"
    place = whole.index(name) + len(name) + 4 + 2 * 8  # after the rank and two sizes
    q4_1, q4_k = (int(gguf.GGMLQuantizationType[each]).to_bytes(4, "little") for each in ("Q4_1", "Q4_K"))
    assert whole[place : place + 4] == q4_1
    path.write_bytes(whole[:place] + q4_k + whole[place + 4 :])
    with pytest.raises(ModelError, match=r"ffn_gate\.weight has shape \[256, 64\], which is invalid for its storage"):
        open_model(str(path))
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=r"ffn_down\.weight \(9216 bytes at \d+\) does not fit into the file"):
        open_model(str(path))
