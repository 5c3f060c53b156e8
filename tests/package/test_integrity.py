"""Two thousand ways to damage a package: each is refused with a sentence, before any of its code is loaded."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import PackageError, UsageError
from inlay.flow import build
from inlay.package import loader
from inlay.package.loader import check_package, load_package
from inlay.package.refit import refit
from tests.models import random_model
from tests.package.corruptions import LEAST, Copy, damages, kind_of
from tests.small_packages import FIELDS, greedy

if TYPE_CHECKING:
    from inlay.package.manifest import Manifest

DAMAGES = 2000


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("count", [500, pytest.param(DAMAGES, marks=pytest.mark.nightly)])
def test_every_damage_is_refused(package: Path, tmp_path: Path, libraries: list[str], count: int) -> None:
    rng = random.Random(0)
    copy = Copy(package, tmp_path / "copy")
    kinds: Counter[str] = Counter()
    for number, (damage, name) in enumerate(damages(copy, count, rng)):
        damage(copy, name, rng)
        with pytest.raises(PackageError) as refused:
            load_package(copy.path, verify=True)
        about = f"{number}: {damage.__name__} of {name}"
        assert refused.value.problem.endswith("."), about
        assert refused.value.remedy, about
        assert not libraries, about
        kinds[kind_of(name)] += 1
        copy.restore()
    assert sum(kinds.values()) == count
    assert min(kinds.values()) >= LEAST * count // DAMAGES, kinds
    assert str(tmp_path) not in mapped_files()
    load_package(copy.path, verify=True)
    assert libraries, "the counter counts"
    assert str(tmp_path) in mapped_files()


def test_damaged_weights_are_found_without_being_asked(package: Path, tmp_path: Path, libraries: list[str]) -> None:
    """The first load reads the weights and leaves a mark, which whoever writes to the file makes invalid."""
    copy = Copy(package, tmp_path / "copy")
    weights = copy.folder / "weights.safetensors"
    copy.write(weights.name, copy.read(weights.name))
    load_package(copy.path)
    assert (copy.folder / ".verified").is_file()
    sound, before = weights.read_bytes(), weights.stat()
    damaged = sound[:-1] + bytes([sound[-1] ^ 1])

    libraries.clear()
    weights.write_bytes(damaged)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(PackageError, match="damaged between bytes 0 and"):
        load_package(copy.path)

    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(PackageError, match="damaged between bytes 0 and"):
        load_package(copy.path, verify=True)
    assert not libraries
    # A disk that changes bytes and no times is what `verify` is for: without it, this is not found.
    load_package(copy.path)

    copy.write(weights.name, damaged)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(PackageError, match="damaged between bytes 0 and"):
        load_package(copy.path)  # the same times, and another file

    copy.write(weights.name, sound)
    assert greedy(load_package(copy.path), torch.tensor([[5, 6, 7]]), 2).shape == (1, 2)


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    """A folder that happens to hold `versions` is no package, and nobody's files are swept away."""
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "0001_first.py").write_text("mine")
    with pytest.raises(UsageError, match="is not an Inlay package"):
        build("unused", tmp_path)
    assert (tmp_path / "versions" / "0001_first.py").read_text() == "mine"


def test_a_build_while_somebody_loads(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old version goes away under the hands of who loads it: the new one is loaded."""
    random_model(FIELDS, seed=5).save_pretrained(tmp_path / "model")
    copy = Copy(package, tmp_path / "copy")
    made: list[Manifest] = []

    def check_late(*args: Any, **kwargs: Any) -> None:
        if not made:
            made.append(refit(copy.path, str(tmp_path / "model")))
        check_package(*args, **kwargs)

    monkeypatch.setattr(loader, "check_package", check_late)
    loaded = load_package(copy.path)
    assert loaded.folder != copy.folder
    assert loaded.manifest == made[0]


def test_a_copy_without_links(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "copy")
    with pytest.raises(PackageError, match=r"copied without its links.*cp -a"):
        load_package(tmp_path / "copy")
