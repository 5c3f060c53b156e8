"""What one token costs, counted and not timed: kernels, bytes of weights, allocations, instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from torch.profiler import ProfilerActivity, profile

import inlay
from inlay.compile.load import load_package
from inlay.flow import Options
from inlay.runtime.session import Session
from models import llama_folder

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 2
STEPS = """
import sys, torch
from inlay.compile.load import load_package
from inlay.runtime.session import Session
torch.set_num_threads(1)
session = Session(load_package(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    session.advance([[1]])
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("cost")
    model = llama_folder(home / "model", num_hidden_layers=LAYERS, tie_word_embeddings=True)
    inlay.build(str(model), home / "package", Options(max_length=128, weights="int4"))
    return home / "package"


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
    """Every weight is bound once a step, so a token reads no byte of them twice; the embedding is the head's weight."""
    loaded = load_package(package)
    for bucket, _ in loaded.buckets:
        bound = [name for step in bucket.steps for name in step.constants]
        twice = {name for name in bound if bound.count(name) > 1}
        assert twice <= {"lm_head.weight", "model.embed_tokens.weight"}
        read = sum(loaded.weights[name].nbytes for name in set(bound))
        assert read <= loaded.manifest.weights_file.size


def test_allocations(package: Path) -> None:
    """Every kernel makes one tensor; beside those there is little."""
    session = Session(load_package(package))
    session.advance([[1]])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        session.advance([[1]])
    made = [
        event for event in found.profiler.kineto_results.events() if event.name() == "[memory]" and event.nbytes() > 0
    ]  # type: ignore[union-attr]
    assert 0 < len(made) <= LAYERS * 14 + 30


@pytest.mark.skipif(not shutil.which("perf"), reason="needs perf")
def test_instructions(package: Path) -> None:
    counts = []
    for steps in (20, 120):
        command = ["perf", "stat", "-x,", "-e", "instructions:u", sys.executable, "-c", STEPS, str(package), str(steps)]
        done = subprocess.run(command, capture_output=True, text=True)
        found = re.search(r"^(\d+),,instructions:u", done.stderr, re.MULTILINE)
        if not found:
            pytest.skip("perf cannot count instructions here")
        counts.append(int(found[1]))
    assert 0 < (counts[1] - counts[0]) / 100 < 1_500_000


def test_a_long_text_costs_no_more_code(package: Path) -> None:
    """500 steps of changing batch and length: the same two libraries, and none of them compiles."""
    session = Session(load_package(package))
    before = set(sys.modules)
    for step in range(500):
        if session.lengths[0] > 120:
            session.restart()
        session.advance([[1] * (1 + step % 3)])
    assert not {name for name in set(sys.modules) - before if name.startswith("torch._inductor")}
