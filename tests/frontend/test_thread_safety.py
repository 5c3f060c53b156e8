"""Models are opened and captured from several threads: each is its own, and nothing else in the process changes."""

from __future__ import annotations

import logging
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.frontend import capture, open_model
from inlay.frontend.fake_tensors import fake_parameters, is_fake
from inlay.program.text.printer import dump
from inlay.program.tracing_lock import tracing_lock
from inlay.rewrite.pattern_trees import trace_pattern
from inlay.transforms.base import find_transform
from tests.models import tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.frontend import SourceModel

pytestmark = pytest.mark.fast


def _seen(model: SourceModel) -> dict[str, Any]:
    shapes = {name: tuple(value.shape) for name, value in model.example.module.named_parameters()}
    return {"config": dict(model.config_facts), "shapes": shapes, "names": sorted(model.tensors)}


def test_headers_are_kept_apart(tmp_path: Path) -> None:
    """Eight files of different sizes, opened at the same moment by eight threads."""
    sizes = [(each + 1, 32 * (each + 1)) for each in range(8)]
    paths = [str(tiny_gguf(tmp_path / f"{layers}.gguf", layers, inner=inner)) for layers, inner in sizes]
    alone = [_seen(open_model(path)) for path in paths]
    start = threading.Barrier(8)

    def opened(path: str) -> list[dict[str, Any]]:
        start.wait()
        return [_seen(open_model(path)) for _ in range(2)]

    with ThreadPoolExecutor(8) as pool:
        for wanted, found in zip(alone, pool.map(opened, paths), strict=True):
            assert found == [wanted, wanted]


@pytest.mark.nightly  # the next test in CI has captures too
def test_captures_take_turns(tmp_path: Path) -> None:
    """Two captures at the same time give what each gives alone, and the process is as it was."""
    paths = [str(tiny_gguf(tmp_path / f"{each}.gguf", layers=1, inner=32 * each)) for each in (1, 2)]
    before = _process()
    alone = [dump(capture(path)) for path in paths]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda path: dump(capture(path)), paths)) == alone
    assert _process() == before


def test_patterns_are_traced_beside_captures(tmp_path: Path) -> None:
    """Both use parts of Dynamo that know one user at a time."""
    path = str(tiny_gguf(tmp_path / "one.gguf", layers=1))
    rules: list[Any] = [find_transform(name)() for name in ("match_rms_norm", "match_swiglu")]
    patterns = [(each.function, each.example) for rule in rules for each in rule.alternatives({torch.float32})]

    def traced() -> list[int]:
        return [trace_pattern(*each).num_calls for each in patterns]

    alone = dump(capture(path)), traced()
    with ThreadPoolExecutor(4) as pool:
        captures = [pool.submit(lambda: dump(capture(path))) for _ in range(2)]
        traces = [pool.submit(traced) for _ in range(2)]
        assert [each.result() for each in captures] == [alone[0]] * 2
        assert [each.result() for each in traces] == [alone[1]] * 2


def _process() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "warnings": list(warnings.filters),
        "level": logging.getLogger("transformers").level,
        "init": [getattr(torch.nn.init, name) for name in dir(torch.nn.init)],
        "register": torch.nn.Module.register_parameter,
        "call": torch.nn.Module.__call__,
    }


def test_parameters_of_other_threads_are_real() -> None:
    with fake_parameters(), ThreadPoolExecutor(1) as pool:
        other = pool.submit(torch.nn.Linear, 2, 2).result()
        own = torch.nn.Linear(2, 2)
    assert is_fake(own.weight)
    assert not is_fake(other.weight)
    assert other.weight.abs().sum() > 0, "its initialiser ran"


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_other_threads_hear_transformers() -> None:
    """A capture hears no warnings of transformers; whoever else uses it does."""
    heard, logger = _Heard(), logging.getLogger("transformers")
    logger.addHandler(heard)
    log = logging.getLogger("transformers.models.test")
    try:
        with tracing_lock(), ThreadPoolExecutor(1) as pool:
            log.warning("of a capture")
            pool.submit(log.warning, "of somebody else").result()
        log.warning("after it")
    finally:
        logger.removeHandler(heard)
    assert heard.said == ["of somebody else", "after it"]
