"""What a package costs in memory: its weights once, its cache, and little else. Measured in new processes."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from inlay.package import manifest as manifests
from tests.package.random_checkpoint import llama_checkpoint
from tests.small_packages import in_new_process

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20
SLACK = 32 * MB
"""Allocators and threads differ by a few megabytes from run to run; the weights are ten times as much."""
STATUS = """
import json, resource, sys

def status():
    with open("/proc/self/status") as file:
        rows = dict(line.split(":", 1) for line in file)
    return {name: int(rows[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM", "RssAnon")}

import torch
torch.set_num_threads(1)
at = {"import torch": status()}
"""
BUILD = (
    STATUS
    + """
import threading, time

anonymous = [0]

def watch():
    while True:
        anonymous[0] = max(anonymous[0], status()["RssAnon"])
        time.sleep(0.02)

threading.Thread(target=watch, daemon=True).start()
from inlay.flow import BuildOptions, build
build(sys.argv[1], sys.argv[2], BuildOptions(max_length=256))
at["built"] = status() | {"RssAnon": anonymous[0]}
at["compiler_bytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
print(json.dumps(at))
"""
)
LOAD = (
    STATUS
    + """
from inlay.package import load_package
from inlay.runtime import Session
at["import inlay"] = status()
package = load_package(sys.argv[1], verify=True)
at["loaded"] = status()
session = Session(package)
session.advance([list(range(3, 35))])
at["prompt"] = status()
for token in range(5, 10):
    session.advance([[token]])
at["tokens"] = status()
for value in package.weights.values():
    value.max()  # an embedding is read row by row: only now is every weight in memory
at["all weights"] = status()
at["state"] = sum(value.nbytes for value in session._state.values())
at["buckets"] = len(package.buckets)
print(json.dumps(at))
"""
)


def measured(code: str, *paths: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(in_new_process(code, *paths).stdout.splitlines()[-1])
    start = found["import torch"]["VmRSS"]
    rows = [(name, row) for name, row in found.items() if isinstance(row, dict)]
    shown = ", ".join(f"{name} {(row['VmHWM'] - start) / MB:,.0f}" for name, row in rows)
    print(f"{paths[-1].name}: {shown} MB at most above `import torch`, which took {start / MB:,.0f}", found)
    return found


def growth(found: dict[str, Any], until: str, kind: str = "VmHWM") -> int:
    """How much memory was taken, at the worst moment, since torch was imported."""
    last: int = found[until][kind] - found["import torch"]["RssAnon" if kind == "RssAnon" else "VmRSS"]
    return last


def without_bucket(package: Path, path: Path, name: str) -> Path:
    """A package as it would be had nobody asked for a bucket."""
    shutil.copytree(package, path, symlinks=True, copy_function=os.link, ignore=shutil.ignore_patterns(".verified"))
    folder = (path / "current").resolve()
    found = json.loads((folder / manifests.NAME).read_bytes())
    found["buckets"] = [bucket for bucket in found["buckets"] if bucket["name"] != name]
    data = json.dumps(found).encode()
    (folder / manifests.NAME).unlink()
    (folder / manifests.NAME).write_bytes(data)
    home = folder.rename(folder.with_name(manifests.version_hash(data)))
    (path / "current").unlink()
    (path / "current").symlink_to(f"versions/{home.name}")
    return path


@pytest.mark.nightly
def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """287 MB of weights, two buckets: at the worst moment no more than their size × 1.1 and the cache."""
    weights = llama_checkpoint(
        tmp_path / "model",
        num_hidden_layers=2,
        hidden_size=1024,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=24000,
    )
    measured(BUILD, tmp_path / "model", tmp_path / "package")
    both = measured(LOAD, tmp_path / "package")
    assert both["buckets"] == 2
    assert growth(both, "import inlay") < SLACK, "nothing is imported that loading does not need"
    assert growth(both, "loaded") < SLACK, "nothing of the weights is read before it is used"
    assert weights < growth(both, "all weights") <= 1.1 * weights + both["state"]
    assert growth(both, "all weights", "RssAnon") < SLACK + both["state"], "weights are a file, not copies"
    one = measured(LOAD, without_bucket(tmp_path / "package", tmp_path / "one", "length=1"))
    assert one["buckets"] == 1
    assert growth(both, "all weights") - growth(one, "all weights") < SLACK, "buckets share their weights"


@pytest.mark.nightly
def test_a_package_of_more_than_two_gigabytes(tmp_path: Path) -> None:
    """Built and loaded; neither holds weights twice."""
    weights = llama_checkpoint(
        tmp_path / "model",
        num_hidden_layers=4,
        hidden_size=2560,
        intermediate_size=6912,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=64000,
    )
    assert weights > 2 << 30
    built = measured(BUILD, tmp_path / "model", tmp_path / "package")
    # Pages of the checkpoint count as memory of whoever has read them; the system takes them back when it likes.
    assert growth(built, "built") < weights + 320 * MB
    assert growth(built, "built", "RssAnon") < 320 * MB, "no weight stays in memory of the build's own"
    loaded = measured(LOAD, tmp_path / "package")
    assert weights < growth(loaded, "all weights") <= 1.1 * weights + loaded["state"]
    assert growth(loaded, "all weights", "RssAnon") < 16 * MB + loaded["state"]
