"""Two thousand ways to damage a package: each is refused with a sentence, before any of its code is loaded."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.compile import load, load_package, native
from inlay.compile import manifest as manifests
from inlay.compile.load import check, read_manifest
from inlay.compile.refit import refit
from inlay.errors import PackageError, UsageError
from inlay.flow import build
from models import random_model
from package.packages import FIELDS, greedy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.xdist_group("package")
DAMAGES = 2000
LEAST = 50
"""Every kind of file is damaged at least as often."""


class Copy:
    """A package made of links to the files of another; a file that is damaged becomes one of its own."""

    def __init__(self, package: Path, path: Path) -> None:
        self.path, self.source = path, (package / "current").resolve()
        self.folder = path / "versions" / self.source.name
        self.names = sorted(
            file.relative_to(self.source).as_posix()
            for file in self.source.rglob("*")
            if file.is_file() and file.name != ".verified"
        )
        self.restore()

    def restore(self) -> None:
        """As it was. What is whole stays: two thousand times all files would take longer than all loads."""
        for other in (self.path / "versions").glob("*"):
            if other != self.folder:
                other.rename(self.folder)
        for file in list(self.folder.rglob("*")):
            name = file.relative_to(self.folder).as_posix()
            if file.is_dir() and not file.is_symlink():
                if name in self.names:
                    file.rmdir()
            elif file.is_symlink() or name not in self.names or not file.samefile(self.source / name):
                file.unlink()
        for name in self.names:
            if not (self.folder / name).exists():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(self.source / name, self.folder / name)
        if (self.path / "current").is_dir() and not (self.path / "current").is_symlink():
            shutil.rmtree(self.path / "current")
        self.link(f"versions/{self.folder.name}")

    def link(self, text: str) -> None:
        (self.path / "current").unlink(missing_ok=True)
        (self.path / "current").symlink_to(text)

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).unlink()
        (self.folder / name).write_bytes(data)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


def flip_a_bit(copy: Copy, name: str, rng: random.Random) -> None:
    data = bytearray(copy.read(name))
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    copy.write(name, bytes(data))


def change_a_byte(copy: Copy, name: str, rng: random.Random) -> None:
    data = bytearray(copy.read(name))
    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    copy.write(name, bytes(data))


def change_the_end_of_a_line(copy: Copy, name: str, rng: random.Random) -> None:
    """Readers of text see no difference between these."""
    data = bytearray(copy.read(name))
    ends = [place for place, byte in enumerate(data[:100_000]) if byte == ord("\n")]
    if ends:
        data[rng.choice(ends)] = ord("\r")
        copy.write(name, bytes(data))
    else:
        change_a_byte(copy, name, rng)


def fill_with_zeros(copy: Copy, name: str, rng: random.Random) -> None:
    """A page that never reached the disk."""
    data = bytearray(copy.read(name))
    full = [place for place in range(0, len(data), 512) if any(data[place : place + 512])]
    place = rng.choice(full)
    data[place : place + 512] = bytes(len(data[place : place + 512]))
    copy.write(name, bytes(data))


def cut_short(copy: Copy, name: str, rng: random.Random) -> None:
    data = copy.read(name)
    copy.write(name, data[: rng.randrange(len(data))])


def extend(copy: Copy, name: str, rng: random.Random) -> None:
    copy.write(name, copy.read(name) + rng.randbytes(rng.choice((1, 8, 4096))))


def delete(copy: Copy, name: str, rng: random.Random) -> None:
    (copy.folder / name).unlink()


def swap(copy: Copy, name: str, rng: random.Random) -> None:
    """Two files under each other's names."""
    mine = copy.read(name)
    other = rng.choice([each for each in copy.names if copy.read(each) != mine])
    theirs = copy.read(other)
    copy.write(name, theirs)
    copy.write(other, mine)


def replace_by_a_link(copy: Copy, name: str, rng: random.Random) -> None:
    (copy.folder / name).unlink()
    (copy.folder / name).symlink_to(copy.source / name)


def replace_by_a_folder(copy: Copy, name: str, rng: random.Random) -> None:
    (copy.folder / name).unlink()
    (copy.folder / name).mkdir()


def add_a_file(copy: Copy, name: str, rng: random.Random) -> None:
    """Beside the file, under a name that nobody wrote."""
    file = copy.folder / name
    file.with_name(f"{file.stem}-{rng.randrange(1000)}{rng.choice(['.json', '.so', '.jinja', ''])}").write_bytes(b"{}")


def change_the_link(copy: Copy, name: str, rng: random.Random) -> None:
    was = os.readlink(copy.path / "current")
    place = rng.randrange(len(was))
    other = rng.choice([letter for letter in "0123456789abcdefxyz/." if letter != was[place]])
    copy.link(was[:place] + other + was[place + 1 :])


def replace_the_link(copy: Copy, name: str, rng: random.Random) -> None:
    link = copy.path / "current"
    match rng.randrange(6):
        case 0:
            link.unlink()
        case 1:
            link.unlink()
            link.write_text(f"versions/{copy.folder.name}")
        case 2:
            copy.link("current")
        case 3:
            copy.link(str(copy.source))
        case 4:
            copy.link("versions")
        case 5:
            link.unlink()
            shutil.copytree(copy.folder, link)


def rename_the_version(copy: Copy, name: str, rng: random.Random) -> None:
    """The folder says another hash than the manifest has; the link follows."""
    other = copy.folder.name[::-1]
    copy.folder.rename(copy.folder.with_name(other))
    copy.link(f"versions/{other}")


OF_FILES = (
    flip_a_bit,
    flip_a_bit,
    change_a_byte,
    change_the_end_of_a_line,
    fill_with_zeros,
    cut_short,
    cut_short,
    extend,
    delete,
    swap,
    replace_by_a_link,
    replace_by_a_folder,
    add_a_file,
)
OF_LINKS = (change_the_link, replace_the_link, rename_the_version)


def kind_of(name: str) -> str:
    """Compiled code, its source, calls, weights …: what a file is for, whatever its number."""
    return name.partition("-")[2] if name[0].isdigit() else name


def damages(copy: Copy, count: int, rng: random.Random) -> Iterator[tuple[Callable[..., None], str]]:
    """All kinds of files and of damages, as evenly as the count allows."""
    kinds: dict[str, list[str]] = {}
    for name in copy.names:
        kinds.setdefault(kind_of(name), []).append(name)
    order = [*kinds, "the link"]
    for number in range(count):
        kind = order[number % len(order)]
        if kind == "the link":
            yield rng.choice(OF_LINKS), kind
        else:
            yield OF_FILES[number // len(order) % len(OF_FILES)], rng.choice(kinds[kind])


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


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


def test_every_damage_is_refused(package: Path, tmp_path: Path, libraries: list[str]) -> None:
    rng = random.Random(0)
    copy = Copy(package, tmp_path / "copy")
    kinds: Counter[str] = Counter()
    for number, (damage, name) in enumerate(damages(copy, DAMAGES, rng)):
        damage(copy, name, rng)
        with pytest.raises(PackageError) as refused:
            load_package(copy.path, verify=True)
        about = f"{number}: {damage.__name__} of {name}"
        assert refused.value.problem.endswith("."), about
        assert refused.value.remedy, about
        assert not libraries, about
        kinds[kind_of(name)] += 1
        copy.restore()
    assert sum(kinds.values()) == DAMAGES
    assert min(kinds.values()) >= LEAST, kinds
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


def sealed(copy: Copy, change: Callable[[Any], None]) -> Path:
    """A package whose manifest says something else, and whose hashes agree with it."""
    copy.restore()
    found = json.loads(copy.read(manifests.NAME))
    change(found)
    data = json.dumps(found).encode()
    copy.write(manifests.NAME, data)
    home = copy.folder.rename(copy.folder.with_name(manifests.identity(data)))
    copy.link(f"versions/{home.name}")
    return copy.path


def outside(found: Any) -> None:
    found["files"]["../../../mine.txt"] = found["files"]["remarks.jsonl"]


def absolute(found: Any) -> None:
    found["files"]["/etc/hostname"] = found["files"]["remarks.jsonl"]


def code_that_is_not_listed(found: Any) -> None:
    del found["files"][found["buckets"][0]["pieces"][1]["file"]]


def code_from_elsewhere(found: Any) -> None:
    found["buckets"][0]["pieces"][1]["file"] = "../../../other.so"


def absurd_size(found: Any) -> None:
    found["weights_file"]["size"] = 1 << 60


def absurd_shape(found: Any) -> None:
    found["weights"]["lm_head.weight"]["shape"] = [1 << 40, 1 << 40]


def no_hashes_of_weights(found: Any) -> None:
    found["weights_file"]["chunks"] = []


def no_such_type(found: Any) -> None:
    found["weights"]["lm_head.weight"]["dtype"] = "load"


def no_such_weight(found: Any) -> None:
    found["buckets"][1]["steps"][1]["constants"][0] = "other"


def no_such_value(found: Any) -> None:
    found["buckets"][1]["steps"][1]["ins"][0] = "other"


def no_such_piece(found: Any) -> None:
    found["buckets"][1]["steps"][1]["piece"] = "other"


def one_input_too_few(found: Any) -> None:
    found["buckets"][1]["steps"][1]["ins"].pop()


def no_such_result(found: Any) -> None:
    found["buckets"][1]["results"] = ["other"]


def a_name_twice(found: Any) -> None:
    found["bindings"]["rows"].append(found["bindings"]["rows"][0])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (outside, "outside the package"),
        (absolute, "outside the package"),
        (code_that_is_not_listed, "is no part of the package"),
        (code_from_elsewhere, "is no file of the package"),
        (absurd_size, "is damaged or incomplete"),
        (absurd_shape, "does not hold lm_head.weight as the manifest says"),
        (no_hashes_of_weights, "does not know all of"),
        (no_such_type, "does not hold lm_head.weight as the manifest says"),
        (no_such_weight, "takes other, which nothing gives"),
        (no_such_value, "takes other, which nothing gives"),
        (no_such_piece, "calls other, which is no piece"),
        (one_input_too_few, "does not fit what it takes or gives"),
        (no_such_result, "comes from nowhere"),
        (a_name_twice, "not what its format says"),
    ],
)
def test_manifests_that_are_wrong_in_themselves(
    package: Path, tmp_path: Path, libraries: list[str], change: Callable[[Any], None], sentence: str
) -> None:
    path = sealed(Copy(package, tmp_path / "copy"), change)
    with pytest.raises(PackageError, match=sentence) as refused:
        load_package(path)
    assert refused.value.remedy
    assert not libraries


STRANGE = (None, 0, -1, 1 << 70, 3.5, "", "x", "../x", [], {}, [1], {"a": 1}, True)


def places(found: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if isinstance(found, (dict, list)):
        for key in found if isinstance(found, dict) else range(len(found)):
            yield (*at, key)
            yield from places(found[key], (*at, key))


def something_strange(rng: random.Random) -> Callable[[Any], None]:
    """Something in the manifest becomes something else, or is gone."""

    def change(found: Any) -> None:
        part = rng.choice(sorted(found))
        *parents, last = rng.choice([place for place in places(found) if place[0] == part])
        for key in parents:
            found = found[key]
        if rng.randrange(5):
            found[last] = rng.choice(STRANGE)
        else:
            del found[last]

    return change


def test_manifests_with_something_strange_in_them(package: Path, tmp_path: Path) -> None:
    """A package loads or is refused with a sentence, whatever its manifest says: no other error comes out."""
    rng = random.Random(0)
    copy = Copy(package, tmp_path / "copy")
    refused = 0
    for _ in range(300):
        path = sealed(copy, something_strange(rng))
        try:
            load_package(path)
        except PackageError as error:
            if not error.remedy:
                raise
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}'])
def test_manifests_that_are_none(tmp_path: Path, data: bytes) -> None:
    home = tmp_path / "versions" / manifests.identity(data)
    home.mkdir(parents=True)
    (home / manifests.NAME).write_bytes(data)
    (tmp_path / "current").symlink_to(f"versions/{home.name}")
    with pytest.raises(PackageError, match="not what its format says"):
        read_manifest(tmp_path)


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    """A folder that happens to hold `versions` is no package, and nobody's files are swept away."""
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "0001_first.py").write_text("mine")
    with pytest.raises(UsageError, match="is no package"):
        build("unused", tmp_path)
    assert (tmp_path / "versions" / "0001_first.py").read_text() == "mine"


def test_a_build_while_somebody_loads(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old version goes away under the hands of who loads it: the new one is loaded."""
    random_model(FIELDS, seed=5).save_pretrained(tmp_path / "model")
    copy = Copy(package, tmp_path / "copy")
    made = []

    def check_late(*args: Any, **kwargs: Any) -> None:
        if not made:
            made.append(refit(copy.path, str(tmp_path / "model")))
        check(*args, **kwargs)

    monkeypatch.setattr(load, "check", check_late)
    loaded = load_package(copy.path)
    assert loaded.folder != copy.folder
    assert loaded.manifest == made[0]


def test_a_copy_without_links(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "copy")
    with pytest.raises(PackageError, match=r"copied without its links.*cp -a"):
        load_package(tmp_path / "copy")
