"""The seam between decode steps and device graphs. On a CPU it is the executable itself.

Where there is no GPU, the protocol is tested with the real classes on a CPU that is said to have graphs: then
`GraphReplayer` calls the code instead of a graph. Not run on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.package import load_package
from inlay.runtime import Session, decode_replay
from inlay.runtime.decode_replay import ReplayedSteps, has_graphs, open_steps
from inlay.runtime.engine import Engine
from inlay.runtime.outputs import collect
from inlay.runtime.request import Request

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.lowering.executable import Executable


@pytest.fixture(scope="module")
def executable(package: Path) -> Executable:
    return load_package(package)


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in: a CPU with graphs."""
    monkeypatch.setattr(decode_replay, "has_graphs", lambda device: True)


def _advance(session: Session, steps: int) -> list[torch.Tensor]:
    batch = session.batch
    made = [session.advance([[3, 4, 5 + place] for place in range(batch)])]
    for _ in range(steps):
        made.append(session.advance(made[-1].argmax(-1, keepdim=True)))
    return made


def test_a_cpu_runs_the_executable_itself(executable: Executable) -> None:
    assert not has_graphs(torch.device("cpu"))
    assert executable.device == torch.device("cpu")
    assert open_steps(executable, executable.new_state()) is executable
    assert Session(executable)._run is executable


@pytest.mark.usefixtures("with_graphs")
def test_decode_steps_of_a_session_are_captured_once(executable: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of plain steps to the bit, kept by the caller over later steps; prompts are not captured."""
    session = Session(executable, 2)
    assert isinstance(session._run, ReplayedSteps)
    found = _advance(session, 6)
    assert [batch for _, batch in session._run.captured] == [2]
    monkeypatch.undo()
    plain = Session(executable, 2)
    wanted = _advance(plain, 6)
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    assert all(torch.equal(session._state[name][:2, :, :9], plain._state[name][:2, :, :9]) for name in plain._state)


@pytest.mark.usefixtures("with_graphs")
def test_inputs_are_checked_before_a_replay(executable: Executable) -> None:
    state = executable.new_state()
    steps = open_steps(executable, state)
    given = {"input_ids": torch.tensor([[3]]), "slots": torch.tensor([0]), "lengths": torch.tensor([0])}
    steps({**given, **state})
    for wrong in ({"slots": torch.tensor([9])}, {"input_ids": torch.tensor([[-1]])}, {"lengths": torch.tensor([999])}):
        with pytest.raises(Exception, match="must be from 0 to"):
            steps({**given, **wrong, **state})
    assert len(steps.captured) == 1


def test_an_engine(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests of different lengths at once: the tokens of an engine without replay, one capture a batch size."""

    def answers(engine: Engine) -> list[Any]:
        requests = [Request(tuple(range(3, 6 + n)), max_tokens=4 + 2 * n, ignore_eos=True) for n in range(3)]
        handles = [engine.submit(each) for each in requests]
        while engine.step():
            pass
        engine.close()
        return [collect(handle).tokens for handle in handles]

    plain = Engine.open(package)
    assert isinstance(plain._package, type(load_package(package)))
    wanted = answers(plain)
    monkeypatch.setattr(decode_replay, "has_graphs", lambda device: True)
    engine = Engine.open(package)
    assert answers(engine) == wanted
    assert sorted(batch for _, batch in engine._package.captured) == [1, 2, 3]
