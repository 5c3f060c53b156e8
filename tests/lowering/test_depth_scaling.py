"""Depth costs no compiling: 60 layers are the same pieces as 15."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from inlay.flow import BuildOptions, build, prepare, transform
from inlay.frontend import capture
from inlay.lowering.lower import lower
from tests.models import random_model
from tests.small_packages import FIELDS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.nightly
def test_pieces_do_not_grow(tmp_path: Path) -> None:
    shapes = []
    for layers in (3, 9):
        folder = tmp_path / str(layers)
        random_model(FIELDS | {"num_hidden_layers": layers}).save_pretrained(folder)
        options = BuildOptions(max_length=64)
        program, _ = transform(prepare(capture(str(folder)), options), options)
        lowered = lower(program, ["length=1"])
        shapes.append(
            [
                (piece.name, len(piece.program), piece.is_eager)
                for _, _, plan in lowered.buckets
                for piece in plan.pieces
            ]
        )
        assert [len(plan.steps) for _, _, plan in lowered.buckets] == [layers + 2] * 2
        compiled = [piece for _, _, plan in lowered.buckets for piece in plan.pieces if not piece.is_eager]
        assert len(compiled) == 4, "one block and one head a bucket"
    assert shapes[0] == shapes[1]


@pytest.mark.nightly
def test_time_of_a_build(tmp_path: Path) -> None:
    seconds = {}
    for layers in (15, 60):
        folder = tmp_path / str(layers)
        random_model(FIELDS | {"num_hidden_layers": layers}).save_pretrained(folder)
        start = time.perf_counter()
        build(str(folder), tmp_path / f"package{layers}", BuildOptions(max_length=64))
        seconds[layers] = time.perf_counter() - start
    print(f"\n15 layers {seconds[15]:.1f} s, 60 layers {seconds[60]:.1f} s")
    assert seconds[60] / seconds[15] <= 1.5
