"""Measuring what steps read, write and allocate: sound decoders pass, planted and drawn faults do not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.lowering.executable import Executable
from inlay.package.memory_profiler import (
    READ,
    WRITTEN,
    allocate_arena,
    find_accessed_pages,
    malloc_counter_env,
    record_mallocs,
)
from inlay.package.memory_traffic import measure
from tests.package.traffic_faults import ROOMS, decoder, seed_of_commit

HERE = Path(__file__).parent


def _report(seed: int, count: int) -> dict[str, object]:
    command = [sys.executable, str(HERE / "traffic_faults.py"), "--seed", str(seed), "--count", str(count)]
    run = subprocess.run(command, env=malloc_counter_env(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, object] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.nightly)])
def test_faults_are_noticed(count: int) -> None:
    """Those that were thought of, and some that were drawn, with a seed from the commit."""
    report = _report(seed_of_commit(), count)
    assert report["counts"]
    assert (report["sound"], report["missed"]) == ([], []), f"--seed {report['seed']} --count {count}"


def test_without_a_counter() -> None:
    """Pages are watched still, and the report says that allocations were not measured."""
    assert record_mallocs(lambda: None) is None
    traffic = measure(decoder(ROOMS[0]))
    assert not traffic.counts_allocations
    assert list(traffic.problems()) == []
    full = traffic.steps[2]
    assert (full.filled_rows, full.pages["keys"].writes) == (ROOMS[0] - 1, 2), "one page a head"
    assert full.pages["keys"].reads + 2 == 2 * (ROOMS[0] * 64 * 4 // 4096), "what is written first is not noted again"


def test_every_bucket_runs() -> None:
    """Also one whose sizes others take first: its own code is measured."""
    package, calls = decoder(ROOMS[0]), list[int]()
    (one, step), (more, _) = package.buckets

    def noted(given: Any) -> Any:
        calls.append(given["input_ids"].shape[1])
        return step(given)

    every = replace(more, name="all", sizes={**more.sizes, "length": (1, ROOMS[0])})
    measure(Executable(package.bindings, [(one, step), (more, step), (every, noted)], {}))
    assert set(calls) == {1, 40}


def test_reads_and_writes_are_told_apart() -> None:
    whole, parts = allocate_arena(dict.fromkeys("abc", ((2048,), torch.float32)))

    def call() -> None:
        parts["a"][:] = parts["b"]
        parts["c"].add_(1)

    assert list(find_accessed_pages(call, whole)) == [*[WRITTEN] * 2, *[READ] * 2, *[READ | WRITTEN] * 2]
