"""Manifests that are wrong in themselves: each is refused with a sentence, before any code is loaded."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from inlay.errors import PackageError
from inlay.package import manifest as manifests
from inlay.package.loader import load_package, read_manifest
from tests.package.corruptions import Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def sealed(copy: Copy, change: Callable[[Any], None]) -> Path:
    """A package whose manifest says something else, and whose hashes agree with it."""
    copy.restore()
    found = json.loads(copy.read(manifests.NAME))
    change(found)
    data = json.dumps(found).encode()
    copy.write(manifests.NAME, data)
    home = copy.folder.rename(copy.folder.with_name(manifests.version_hash(data)))
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
        (code_that_is_not_listed, "is not part of the package"),
        (code_from_elsewhere, "is not a file of the package"),
        (absurd_size, "is damaged or incomplete"),
        (absurd_shape, "lm_head.weight in weights.safetensors does not match the manifest"),
        (no_hashes_of_weights, "does not have the hashes of all chunks of"),
        (no_such_type, "lm_head.weight in weights.safetensors does not match the manifest"),
        (no_such_weight, "uses other, which is not defined"),
        (no_such_value, "uses other, which is not defined"),
        (no_such_piece, "calls other, which is not a piece"),
        (one_input_too_few, "does not match its inputs or outputs"),
        (no_such_result, "a result or initial state is not defined"),
        (a_name_twice, "does not match its format"),
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


STRANGE: tuple[Any, ...] = (None, 0, -1, 1 << 70, 3.5, "", "x", "../x", [], {}, [1], {"a": 1}, True)


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


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": 3}'])
def test_manifests_that_are_none(tmp_path: Path, data: bytes) -> None:
    home = tmp_path / "versions" / manifests.version_hash(data)
    home.mkdir(parents=True)
    (home / manifests.NAME).write_bytes(data)
    (tmp_path / "current").symlink_to(f"versions/{home.name}")
    with pytest.raises(PackageError, match="does not match its format"):
        read_manifest(tmp_path)
