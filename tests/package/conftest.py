from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from eager import byte_tokenizer
from inlay.compile import native
from inlay.compile.cache import BuildCache
from models import random_model
from package.packages import FIELDS, ROOM
from shared import once_a_run, own_cache

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildCache:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path / "cache"))
    return BuildCache()


@pytest.fixture(scope="session")
def model() -> Any:
    return random_model(FIELDS)


@pytest.fixture(scope="session")
def model_folder(model: Any) -> Path:
    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)

    return once_a_run("model", save)


@pytest.fixture(scope="session")
def package(model_folder: Path) -> Path:
    """A package with two buckets and four slots. Read it only: all tests share it."""
    from inlay.flow import Options, build

    options = Options(max_length=ROOM, max_batch=4)
    return once_a_run("package", lambda path: build(str(model_folder), path / "package", options)) / "package"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every library that anybody asks torch to load, which it still does."""
    asked: list[str] = []
    real = native._aoti.AOTIModelContainerRunnerCpu

    def noted(file: str, *rest: Any) -> Any:
        asked.append(file)
        return real(file, *rest)

    monkeypatch.setattr(native._aoti, "AOTIModelContainerRunnerCpu", noted)
    return asked
