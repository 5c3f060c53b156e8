"""What one token costs, counted and not timed: kernels, bytes of weights, allocations."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING

import pytest
from torch.profiler import ProfilerActivity, profile

from inlay.ops.weight_formats import FORMATS
from inlay.package.loader import load_package
from inlay.runtime.session import Session
from tests.models import LLAMA

if TYPE_CHECKING:
    from pathlib import Path

LAYERS: int = LLAMA["num_hidden_layers"]


@pytest.fixture
def package(int4_package: Path) -> Path:
    return int4_package


def test_kernels(package: Path) -> None:
    """A layer is four linear layers, one attention and four kernels of what lies between them."""
    loaded = load_package(package)
    bucket, _ = loaded.buckets[0]
    assert bucket.name == "length=1"
    block = next(piece for piece in bucket.pieces if piece.name.startswith("block"))
    source = (loaded.folder / block.file).with_suffix(".cpp").read_text()
    body = source[source.index("void AOTInductorModel::run_impl") :]
    called = re.findall(r"aoti_torch_cpu_(\w+)\(", body)
    assert sorted(called) == ["cached_attention", *["packed_linear"] * 4]
    assert len(re.findall(r"^\s*cpp_fused\w+\(", body, re.MULTILINE)) <= 4
    assert "aoti_torch_clone" not in body
    assert "aoti_torch_copy_" not in body
    assert sum(step.piece == block.name for step in bucket.steps) == LAYERS


def test_bytes_read(package: Path) -> None:
    """A token reads every packed weight once, and no weight in a wider form: the embedding is the head's weight."""
    loaded = load_package(package)
    assert loaded.buckets
    for bucket, _ in loaded.buckets:
        bound = [name for step in bucket.steps for name in step.constants]
        twice = {name for name in bound if bound.count(name) > 1}
        assert twice <= {"lm_head.weight", "model.embed_tokens.weight"}
        read = sum(loaded.weights[name].nbytes for name in set(bound))
        assert _packed_bytes() <= read <= _packed_bytes() + _plain_bytes()


def _packed_bytes() -> int:
    """The linear layers in four bits, queries, keys and values as one, gate and up as one; the head in eight."""
    width, inner, heads = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["num_attention_heads"]
    rows = width + 2 * width // heads * LLAMA["num_key_value_heads"]
    four = [(rows, width), (width, width), (2 * inner, width), (width, inner)]
    layer = sum(math.prod(FORMATS["int4-g32"].packing.shape(*each)) for each in four)
    return LAYERS * layer + math.prod(FORMATS["int8"].packing.shape(LLAMA["vocab_size"], width))


def _plain_bytes() -> int:
    """Two norms a layer, the last one, and the frequencies of the positions, in float32."""
    width = LLAMA["hidden_size"]
    return 4 * ((2 * LAYERS + 1) * width + width // LLAMA["num_attention_heads"])


def test_allocations(package: Path) -> None:
    """Every kernel makes one tensor; beside those there is little."""
    session = Session(load_package(package))
    session.advance([[1]])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        session.advance([[1]])
    made = [
        event for event in found.profiler.kineto_results.events() if event.name() == "[memory]" and event.nbytes() > 0
    ]
    assert 0 < len(made) <= LAYERS * 14 + 30


def test_a_long_text_costs_no_more_code(package: Path) -> None:
    """500 steps of changing batch and length: the same two libraries, and none of them compiles."""
    session = Session(load_package(package))
    before = set(sys.modules)
    for step in range(500):
        if session.lengths[0] > 120:
            session.restart()
        session.advance([[1] * (1 + step % 3)])
    assert not {name for name in set(sys.modules) - before if name.startswith("torch._inductor")}
