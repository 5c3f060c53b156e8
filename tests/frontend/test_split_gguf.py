"""Split GGUF models: read as one from any part or the folder; missing and foreign parts are named."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch

from inlay.errors import ModelError
from inlay.frontend import open_model
from inlay.frontend.model_spec import identify
from inlay.package_cache import compute_key, model_name
from tests.models import copy_metadata, finish_gguf, tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.fast


def _split(whole: Path, count: int, **changes: Any) -> list[Path]:
    """Split a file as llama-gguf-split does: part 1 has the metadata, and every part states its number."""
    reader = gguf.GGUFReader(whole)
    share = -(-len(reader.tensors) // count)
    paths = [whole.with_name(f"{whole.stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        if number:
            writer.kv_data[0].pop("general.architecture")
        else:
            copy_metadata(reader, writer)
        stated = {"no": number, "count": count, "tensors": len(reader.tensors), **changes}
        writer.add_uint16("split.no", stated["no"])
        writer.add_uint16("split.count", stated["count"])
        writer.add_int32("split.tensors.count", stated["tensors"])
        for tensor in reader.tensors[number * share : (number + 1) * share]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish_gguf(writer)
    return paths


def _refusal(path: Path) -> str:
    with pytest.raises(ModelError) as refused:
        open_model(str(path))
    return str(refused.value)


def test_any_part_or_the_folder_is_the_whole_model(tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path / "m.gguf")
    parts = _split(whole, 3)
    wanted = open_model(str(whole))
    whole.unlink()
    for path in (*parts, tmp_path):
        opened = open_model(str(path))
        assert opened.name == parts[0].name == identify(str(path)).name
        assert opened.tensors.keys() == wanted.tensors.keys()
        assert model_name(str(parts[1])) == "m"
    tiny_gguf(whole)
    for name, ref in opened.tensors.items():
        assert torch.equal(ref.read(), wanted.tensors[name].read())


def test_one_part(tmp_path: Path) -> None:
    (path,) = _split(tiny_gguf(tmp_path / "m.gguf"), 1)
    assert open_model(str(path)).tensors


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = _split(tiny_gguf(tmp_path / "m.gguf"), 3)
    (tmp_path / "m.gguf").unlink()
    parts[1].unlink()
    said = (
        "m-00001-of-00003.gguf is one of the 3 parts of a split GGUF model, of which m-00002-of-00003.gguf is missing."
        " Put all parts into one folder."
    )
    assert _refusal(parts[0]) == _refusal(parts[2]) == _refusal(tmp_path) == said
    parts[0].unlink()
    assert "m-00001-of-00003.gguf and 1 more are missing" in _refusal(parts[2])


def test_a_foreign_part_is_named(tmp_path: Path) -> None:
    parts = _split(tiny_gguf(tmp_path / "m.gguf"), 3)
    shutil.copy(parts[1], parts[2])
    said = _refusal(parts[0])
    assert said.startswith("m-00003-of-00003.gguf is not a part of the same model as m-00001-of-00003.gguf")
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(_split(tiny_gguf(other / "m.gguf", layers=1), 3)[2], parts[2])
    assert _refusal(parts[0]) == said


def test_names_that_contradict_the_metadata(tmp_path: Path) -> None:
    parts = _split(tiny_gguf(tmp_path / "m.gguf"), 3)
    renamed = parts[0].rename(tmp_path / "model.gguf")
    assert "states that it is part 0 (from 0) of 3 of a split GGUF model" in _refusal(renamed)
    _split(tmp_path / "m.gguf", 3, tensors=7)
    assert "The 3 parts of m-00001-of-00003.gguf have 20 tensors, but 7 are stated." in _refusal(parts[0])


def test_the_package_cache_sees_every_part(tmp_path: Path) -> None:
    parts = _split(tiny_gguf(tmp_path / "m.gguf"), 3)
    before = compute_key(str(parts[0]), {})["files"]
    assert compute_key(str(parts[0]), {})["files"] == before
    parts[2].write_bytes(parts[2].read_bytes() + bytes(32))
    assert compute_key(str(parts[0]), {})["files"] != before
