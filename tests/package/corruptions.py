"""Ways to damage a package."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

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
        """Write another file, whose number differs: the old one is there until the new one has taken its place."""
        made = self.folder / f"{name}.made"
        made.write_bytes(data)
        made.replace(self.folder / name)

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
