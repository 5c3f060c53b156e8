"""What happens to a package after an upgrade: of Inlay, of torch, of the interface of its kernels."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

from inlay.errors import PackageError
from inlay.lowering.eager_graph import EagerGraph
from inlay.machine import package_version
from inlay.ops import native
from inlay.package.loader import load_package
from tests.small_packages import in_new_process

RUN = Path(native.__file__).parent / "run.cpp"
INTERFACES = {1: "75e1d67798dd"}
"""Version of the kernels' interface → hash of its functions. A change of run.cpp needs a new version."""
LOAD = """
import sys
import inlay, inlay._version
inlay.__version__ = inlay._version.__version__ = sys.argv[2]
print(inlay.load(sys.argv[1]).generate("fox", max_tokens=5).tokens)
"""
OTHER_TORCH = """
import sys, torch
torch.__version__ = "2.99.0+cpu"
import inlay
try:
    inlay.load(sys.argv[1])
except inlay.InlayError as error:
    print(error)
"""


def test_another_patch_version_of_inlay_loads_it(package: Path) -> None:
    said = {in_new_process(LOAD, package, version).stdout for version in ("0.1.0", "0.1.7")}
    assert len(said) == 1
    assert said.pop().startswith("(")


def test_another_torch_refuses_it_with_the_remedy(package: Path) -> None:
    said = in_new_process(OTHER_TORCH, package).stdout
    built = package_version("torch").partition("+")[0]
    assert f"was built with torch {built}, but torch 2.99.0 is installed." in said
    assert f"pip install torch=={built}, or build the package again." in said


def test_kernels_with_another_interface_are_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later Inlay that calls the kernels of a package in another way must not call these."""
    load_package(package)
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    with pytest.raises(PackageError, match=r"its kernels have interface 1, not 2\. Build the package again\."):
        load_package(package)


def test_kernels_without_a_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels.c").write_text("int other(void) { return 1; }")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", "kernels.so", "kernels.c"], cwd=tmp_path, check=True)
    with pytest.raises(PackageError, match=r"kernels\.so cannot be loaded: .*inlay"):
        native.load(tmp_path / "kernels.so")


@pytest.mark.fast
def test_a_change_of_the_interface_needs_a_new_version() -> None:
    functions = re.findall(r"INLAY_EXPORT ([^{;]+?)\s*\{", RUN.read_text())
    text = "\n".join(sorted(" ".join(each.split()) for each in functions))
    found = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert INTERFACES[native.ABI] == found, (
        "the functions of run.cpp changed: increase native.ABI and add its hash here"
    )


def test_an_operator_that_is_not_registered_says_what_to_import() -> None:
    calls = {"ins": ["x"], "calls": [["y", "some_library.scale.default", [{"value": "x"}], {}]], "outs": []}
    with pytest.raises(
        PackageError, match=r"some_library\.scale\.default, which is not registered\. Import the module"
    ):
        EagerGraph(calls)
