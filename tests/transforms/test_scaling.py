"""Time per node must not grow with the depth of the model; a 70-billion-parameter model must fit a small machine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from inlay.config import resolve_config
from inlay.frontend import capture
from inlay.program.fold import fold
from inlay.transforms import Numerics, Stage, Transform, TransformResult, configure, run
from inlay.transforms.pass_manager import TransformStep
from tests.architectures import without_weights
from tests.deep_programs import deepened
from tests.measurement import Calls, seconds
from tests.models import SEVENTY_BILLION, config_folder

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program import Program
    from inlay.transforms import TransformRecord

COUNTED, MORE_CALLS = (8, 48), 1.2
TIMED, MORE_TIME = (8, 32, 128), 1.5


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A small model of three layers, with every pattern traced once: that is paid once, whatever the depth."""
    program = capture(without_weights(tmp_path_factory.mktemp("shallow"), "llama", 3))
    _pipeline(program)
    return program


def _pipeline(program: Program) -> None:
    run(program, configure(resolve_config()))


class CallsOfEach:
    """Notes how many calls each transform makes."""

    def __init__(self) -> None:
        self.counted, self.start = Calls(), 0
        self.figures: dict[str, int] = {}

    def before(self, step: Transform, program: Program) -> None:
        self.start = self.counted.count

    def after(self, step: Transform, program: Program, record: TransformRecord) -> None:
        self.figures[record.key] = self.counted.count - self.start


def _figures(shallow: Program, steps: list[TransformStep]) -> dict[str, list[float]]:
    """Calls per node of the captured program, for each transform at each depth."""
    found: dict[str, list[float]] = {step.key: [] for step in steps}
    for program in (deepened(shallow, layers) for layers in COUNTED):
        each = CallsOfEach()
        with each.counted:
            run(program, steps, [each])
        for key, count in each.figures.items():
            found[key].append(count / len(program))
    return found


def test_deepened_programs_are_what_they_say(shallow: Program) -> None:
    program = deepened(shallow, 8)
    program.graph.lint()
    assert [len(kind) for kind in fold(program).kinds] == [8]
    _, records = run(program, configure(resolve_config()))
    sites = {record.key: record.sites for record in records}
    assert (sites["match_rms_norm"], sites["match_attention"], sites["fuse_add_rms_norm"]) == (17, 8, 16)


@pytest.mark.nightly
def test_calls_per_node(shallow: Program) -> None:
    """Counted for each transform, so that a failure names the one that grows."""
    figures = _figures(shallow, configure(resolve_config()))
    for key, counts in figures.items():
        print(f"{key:28}", [f"{count:.0f} calls" for count in counts])
        assert max(counts) <= MORE_CALLS * counts[0], key
    whole = [sum(counts) for counts in zip(*figures.values(), strict=True)]
    print(f"{'all of them':28}", [f"{count:.0f} calls" for count in whole])
    assert max(whole) <= MORE_CALLS * whole[0]


class Quadratic(Transform):
    """Looks at the whole program once a layer."""

    name, stage, numerics = "quadratic", Stage.CLEAN, Numerics.EXACT

    def apply(self, program: Program) -> TransformResult:
        for node in program.graph.nodes:
            if node.target is torch.ops.aten.silu.default:
                [isinstance(each, type(node)) for each in program.graph.nodes]
        return TransformResult(program, 0)


def test_the_count_sees_what_grows(shallow: Program) -> None:
    counts = _figures(shallow, [TransformStep("quadratic", Quadratic())])["quadratic"]
    assert max(counts) > MORE_CALLS * counts[0]


@pytest.mark.nightly
def test_time_per_node(shallow: Program) -> None:
    """The same by the clock, on a machine that does nothing else."""
    figures = []
    for program in (deepened(shallow, layers) for layers in TIMED):
        best = min(seconds(_pipeline, program) for _ in range(3))
        figures.append(best / len(program) * 1e6)
    print([f"{layers} layers: {figure:.0f} µs" for layers, figure in zip(TIMED, figures, strict=True)])
    assert max(figures) <= MORE_TIME * figures[0]


SEVENTY = """
import json, resource, sys, time
from inlay.frontend import capture
from inlay.config import resolve_config
from inlay.transforms import configure, run
start = time.perf_counter()
program = capture(sys.argv[1])
captured = time.perf_counter()
settings = [f"{entry.key}.enabled=true" for entry in resolve_config().entries]
after, records = run(program, configure(resolve_config(settings=settings)))
print(json.dumps({
    "parameters": program.parameter_count(), "nodes": [len(program), len(after)],
    "capture_s": captured - start, "transforms_s": time.perf_counter() - captured,
    "sites": {record.key: record.sites for record in records}, "status": sorted({each.status for each in records}),
    "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
}))
"""


@pytest.mark.nightly
def test_seventy_billion_parameters_through_every_transform(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, **SEVENTY_BILLION)
    ran = subprocess.run([sys.executable, "-c", SEVENTY, str(folder)], capture_output=True, text=True, check=True)
    figures = json.loads(ran.stdout.splitlines()[-1])
    print(figures)
    assert figures["parameters"] > 70e9
    assert figures["status"] == ["ran"]
    assert figures["sites"]["match_rms_norm"] == 161
    assert figures["sites"]["match_attention"] == 80
    assert figures["sites"]["match_rope"] == 160
    assert figures["sites"]["fuse_add_rms_norm"] == 160
    assert figures["gib"] <= 6
