"""What lies in cache folders is loaded as code: nobody else may write there, and what changed is not used."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from inlay import machine
from inlay.build_cache.store import BuildCache
from inlay.ops import native

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.fast


def _mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    assert _mode(machine.make_private_folder(tmp_path / "a" / "b")) == 0o700


@pytest.mark.parametrize(("mode", "becomes"), [(0o777, 0o700), (0o775, 0o700), (0o755, 0o755), (0o700, 0o700)])
def test_a_folder_that_others_can_write_to(tmp_path: Path, mode: int, becomes: int) -> None:
    tmp_path.chmod(mode)
    assert _mode(machine.make_private_folder(tmp_path)) == becomes


def test_a_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BuildCache(tmp_path / "builds")
    (tmp_path / "builds" / "key").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to another user, who could put code there"):
        machine.make_private_folder(tmp_path)
    with cache.open_entry("key") as found:
        assert found is None
    with pytest.raises(PermissionError), cache.lock_key("key"):
        pass


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Levels that kernels were compiled for; what a compiler makes is a text here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    levels: list[str] = []

    def build(file: Path, level: str = "native") -> None:
        levels.append(level)
        file.write_text(f"kernels for {level}")

    monkeypatch.setattr(native, "build", build)
    return levels


def test_kernels_are_compiled_once(tmp_path: Path, compiled: list[str]) -> None:
    for name in ("one", "two"):
        native.install(tmp_path / name)
        assert (tmp_path / name).read_text() == "kernels for native"
    assert compiled == ["native"]


@pytest.mark.parametrize("suffix", [".so", ".sha256"])
def test_kernels_that_were_changed_are_compiled_again(tmp_path: Path, compiled: list[str], suffix: str) -> None:
    native.install(tmp_path / "one")
    (kept,) = (tmp_path / "cache" / "inlay" / "kernels").glob(f"*{suffix}")
    kept.write_text("something else")
    native.install(tmp_path / "two")
    assert (tmp_path / "two").read_text() == "kernels for native"
    assert len(compiled) == 2


def test_kernels_where_the_cache_is_not_ours(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    native.install(tmp_path / "one")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    native.install(tmp_path / "two")
    assert compiled == ["native", "native"], "nothing of it is used"
