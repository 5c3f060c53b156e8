"""Stock architectures as packages: 64 tokens equal to the eager model, batch 1 and 4, past a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from inlay.errors import ContractError
from inlay.flow import BuildOptions, build, compile_model
from inlay.package.copy_proof import prove
from inlay.package.loader import load_package
from inlay.runtime import Session
from tests.architectures import ARCHITECTURES, NOT_BUILT, Architecture
from tests.models import random_model
from tests.small_packages import ROOM, check_tokens, eager_greedy, greedy

if TYPE_CHECKING:
    from pathlib import Path

DENSE = [each for each in ARCHITECTURES if each.model_type not in NOT_BUILT]


def _config(architecture: Architecture) -> dict[str, object]:
    return {"model_type": architecture.model_type, **architecture.full_config()}


@pytest.mark.nightly  # tests/package/test_real_settings.py has two in CI, with windows and LongRoPE
@pytest.mark.parametrize("architecture", DENSE, ids=lambda each: each.model_type)
def test_architecture(architecture: Architecture, tmp_path: Path) -> None:
    eager = random_model(_config(architecture))
    eager.save_pretrained(tmp_path / "model")
    path = tmp_path / "package"
    build(str(tmp_path / "model"), path, BuildOptions(max_length=ROOM, max_batch=4, buckets=()))
    loaded = load_package(path)
    check_tokens(loaded, eager)
    proof = prove(loaded)
    assert proof.holds, proof.problems
    assert len(proof.states) == 2 * eager.config.num_hidden_layers


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("glm4_moe", marks=pytest.mark.nightly)])
def test_experts(name: str, tmp_path: Path) -> None:
    """Experts with biases and transposed weights, and some that are shared, without a compiler."""
    architecture = next(each for each in ARCHITECTURES if each.model_type == name)
    eager = random_model(_config(architecture))
    eager.save_pretrained(tmp_path)
    check_tokens(compile_model(str(tmp_path), "eager", BuildOptions(max_length=ROOM, max_batch=4)), eager)


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_what_mixes_positions_is_refused(name: str, tmp_path: Path) -> None:
    architecture = next(each for each in ARCHITECTURES if each.model_type == name)
    random_model(_config(architecture)).save_pretrained(tmp_path / "model")
    with pytest.raises(ContractError, match="insert_kv_cache matched nothing"):
        build(str(tmp_path / "model"), tmp_path / "package", BuildOptions(max_length=ROOM))
    assert not (tmp_path / "package" / "current").exists()


def test_there_are_enough() -> None:
    assert len(ARCHITECTURES) >= 40
    assert len(DENSE) >= 32


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_other_backends(backend: str, model_folder: Path, model: object) -> None:
    """The same plan in this process: the same tokens, and no recompile over 20 prompt lengths and 200 steps."""
    executable = compile_model(str(model_folder), backend, BuildOptions(max_length=256))
    prompts = torch.randint(3, 300, (1, 9))
    assert torch.equal(greedy(executable, prompts, 32), eager_greedy(model, prompts, 32))

    def lengths_and_steps() -> None:
        session = Session(executable)
        for length in range(1, 21):
            session.restart()
            session.advance(torch.randint(3, 300, (1, length)))
            for _ in range(10):
                session.advance([[7]])

    from torch._dynamo.utils import counters

    counters.clear()
    lengths_and_steps()
    assert not counters["stats"], dict(counters)
    assert not counters["inductor"], dict(counters)
