"""Source trees: registrations are found with their lines, look-alikes are not, and no file stops the scan."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from inlay.cli.main import app
from inlay.errors import UsageError
from inlay.insight.candidates import Recommendation, find_candidates
from inlay.insight.candidates.advice import Support, advise
from inlay.insight.candidates.candidate import rank
from inlay.insight.candidates.region import Savings
from inlay.ops.catalog import source_tree
from inlay.ops.catalog.source_tree import TreeEntry, TreeEntryKind, entries_for, scan_tree
from inlay.testing import program_of
from inlay.transforms.base import Numerics

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

    from inlay.insight.candidates import Candidate, CandidateSearch

pytestmark = pytest.mark.fast

PYTHON = """
import torch, triton
import triton as tr
import torch._inductor.pattern_matcher as pm
from torch.library import Library, custom_op, triton_op
from torch._inductor.pattern_matcher import register_graph_pattern
from .utils import direct_register_custom_op, register_custom_op
from ..interface import TransformRegistry
NAMESPACE = "mine"
OP = NAMESPACE + "::from_constants"

@torch.library.custom_op("mine::plain", mutates_args=())  # line 12
def plain(x: torch.Tensor) -> torch.Tensor:
    return x

@custom_op(OP, mutates_args=())
def constants(x): ...

triton_op(f"{NAMESPACE}::formatted", mutates_args={})(plain)
library = Library("owned", "FRAGMENT")
library.define("by_schema(Tensor x) -> Tensor")
torch.library.define("mine::functional", "(Tensor x) -> Tensor")
direct_register_custom_op(op_name="swallow", op_func=plain)
direct_register_custom_op("other", plain, target_lib=library)
custom_op(mutates_args=(), name="mine::keyword")

@register_custom_op("flash::decorated", mutates_args=("x",))
def decorated(x): ...

def factory(name, scale):
    @torch.library.custom_op(f"mine::{name}", mutates_args=())
    def inner(x):
        return x

@triton.autotune(configs=[], key=["n"])
@triton.jit
def _rms_norm_kernel(x, n: tl.constexpr):
    helper(x)

@tr.jit(do_not_specialize=["n"])
def other_kernel(n): ...

@triton.jit
def helper(x):
    return x * 2

class QkNormRope:
    def register(self, patterns):
        pm.register_replacement(search, replace, [], pm.fwd_only, patterns)

@register_graph_pattern(CallFunction(torch.ops.aten.add), pass_dict=p)
def graph_pattern(match): ...

register_ad_pattern(search_fn=_swiglu_pattern, replace_fn=other, patterns=p)

@TransformRegistry.register("fuse_swiglu")
class Fuse: ...

class AddRMSNormPattern(VllmPatternReplacement[int]): ...
class Derived(AddRMSNormPattern): ...
"""
FOUND = {
    *("mine::plain", "mine::from_constants", "mine::formatted", "owned::by_schema", "mine::functional"),
    *(
        "mine::keyword",
        "vllm::swallow",
        "owned::other",
        "flash::decorated",
        "mine::{name}",
        "_rms_norm_kernel",
        "other_kernel",
    ),
    *("QkNormRope.register.search", "graph_pattern", "_swiglu_pattern", "fuse_swiglu", "AddRMSNormPattern", "Derived"),
}
NOTHING = '''
import numba, mine
from numba import jit
from mine import custom_op, register_replacement
from torchao.ops import register_custom_op
# @torch.library.custom_op("no::comment", mutates_args=())
"""
@torch.library.custom_op("no::docstring", mutates_args=())
@triton.jit
"""
text = 'torch.library.custom_op("no::string")'

@custom_op("no::other_module", mutates_args=())
def a(): ...

@jit
def b(triton): ...

@register_custom_op("no::fake_implementation")
def c(): ...

register_replacement(search, replace)
mine.triton_op("no::attribute")
parser.define("verbose", default=False)
define("no_receiver(Tensor x) -> Tensor")
registry.register("no_transform")
'''
CPP = r"""
// TORCH_LIBRARY(no, m) { m.def("comment(Tensor x) -> Tensor"); }
/* m.def("block_comment(Tensor x) -> Tensor"); */
#define REGISTER(name) TORCH_LIBRARY(name, m) { m.def("macro(Tensor x) -> ()"); }
#define SPACE from_macro
const char* text = "TORCH_LIBRARY(no, m) { m.def(\"string(Tensor x) -> ()\"); }";
STABLE_TORCH_LIBRARY_FRAGMENT(_C, ops) {
  ops.def(
      "fused_add_rms_norm(Tensor! input, "  // the rest
      "float eps) -> ()");
  if (true) { ops.def("nested.overload(Tensor x) -> ()", &nested); }
  ops.def(R"(raw(Tensor x) -> ())"); ops.def(torch::schema("wrapped() -> ()"));
  ops.def(computed_schema());
  ops.impl("no_impl", &f); other.def("no_other(Tensor x) -> ()");
}
PYBIND11_MODULE(name, m) { m.def("no_pybind", &f); }
TORCH_LIBRARY(SPACE, m) { m.def("defined() -> ()"); }
TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, m) { m.def("expanded() -> ()"); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rmsnorm, flash::rmsnorm);
"""


def _tree(folder: Path) -> Path:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "ops.py").write_text(PYTHON)
    (folder / "pkg" / "nothing.py").write_text(NOTHING)
    (folder / "bindings.cpp").write_text(CPP)
    return folder


def test_python(tmp_path: Path) -> None:
    found = {entry.name: entry for entry in scan_tree(_tree(tmp_path)).entries if entry.path.endswith(".py")}
    assert found.keys() == FOUND, "and nothing of nothing.py, nor the helper function"
    plain = found["mine::plain"]
    assert plain.evidence == f"{tmp_path}/pkg/ops.py:12"
    assert plain.signature == "plain(x: torch.Tensor) -> torch.Tensor"
    assert found["vllm::swallow"].signature == plain.signature
    assert found["owned::by_schema"].signature == "by_schema(Tensor x) -> Tensor"
    assert found["mine::functional"].signature == "(Tensor x) -> Tensor"
    assert found["_rms_norm_kernel"].kind is TreeEntryKind.TRITON
    assert found["graph_pattern"].kind is TreeEntryKind.PATTERN
    assert [name for name, each in found.items() if not each.to_json()["resolved"]] == ["mine::{name}"]


@pytest.mark.parametrize(
    "text",
    [
        *("NAME = 'a'\nNAME = 'b'\n", "for NAME in ('a', 'b'): pass\n", "from .names import NAME\n"),
        *("NAME = 'a'\ndef set():\n    global NAME\n    NAME = 'b'\n", "if x:\n    NAME = 'a'\n"),
        "NAME = 'a'\nfrom .names import NAME\n",
    ],
)
def test_names_that_are_not_constant_are_not_guessed(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"import torch\n{text}torch.library.custom_op(NAME + '::x', f)\n")
    (entry,) = scan_tree(tmp_path).entries
    assert entry.name == "{NAME}::x"


@pytest.mark.parametrize(("second", "namespace"), [("a", "a"), ("b", "{self.lib}")])
def test_libraries_that_share_a_variable(second: str, namespace: str, tmp_path: Path) -> None:
    classes = [
        f"class C{name}:\n    def __init__(self):\n        self.lib = Library('{name}')\n" for name in ("a", second)
    ]
    define = "        self.lib.define('op(Tensor x) -> Tensor')\n"
    (tmp_path / "a.py").write_text("from torch.library import Library\n" + "".join(classes) + define)
    (entry,) = scan_tree(tmp_path).entries
    assert entry.name == f"{namespace}::op"


@pytest.mark.parametrize(
    ("macros", "namespace"),
    [
        ("#define NS one", "one"),
        ("#if A\n#define NS one\n#else\n#define NS two\n#endif", "{NS}"),
        ("#define NS JOIN(a, b)", "{NS}"),
        ('#define NS one\r\n#define OTHER \\\r\n  TORCH_LIBRARY(no, m) { m.def("macro() -> ()"); }', "one"),
    ],
)
def test_macros_are_not_guessed(macros: str, namespace: str, tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_bytes(f'{macros}\nTORCH_LIBRARY( NS , m) {{ m.def("op() -> ()"); }}'.encode())
    assert [entry.name for entry in scan_tree(tmp_path).entries] == [f"{namespace}::op"]


def test_cpp(tmp_path: Path) -> None:
    found = {entry.name: entry for entry in scan_tree(_tree(tmp_path)).entries if entry.path.endswith(".cpp")}
    assert found.keys() == {
        *("_C::fused_add_rms_norm", "_C::nested", "_C::raw", "_C::wrapped", "_C::{computed}", "from_macro::defined"),
        *("{TORCH_EXTENSION_NAME}::expanded", "rmsnorm"),
    }
    entry = found["_C::fused_add_rms_norm"]
    assert CPP.splitlines()[entry.line - 1].strip() == "ops.def("
    assert entry.signature == "fused_add_rms_norm(Tensor! input, float eps) -> ()"


def test_hostile_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = "import torch\ntorch.library.custom_op('good::one', f)\n"
    (tmp_path / "good.py").write_text(good)
    hostile = {
        "broken.py": b"def custom_op(:",
        "latin.py": b"custom_op = '\xe9'",
        "encoding.py": b"# coding: no_such_encoding\ncustom_op = 1",
        "deep.py": b"custom_op = " + b"-" * 200_000 + b"1",
        "sum.py": b"import torch\ntorch.library.custom_op(" + b"'a' + " * 20_000 + b"'b')",
        "binary.py": b"custom_op\0",
        "large.cpp": b"TORCH_LIBRARY(a, m) {" + b" " * source_tree.LARGEST_FILE,
        "comment.cu": b"TORCH_LIBRARY /*" * 60_000,
        "blocks.cu": b"TORCH_LIBRARY(a,m){" * 60_000,
        "quotes.cu": b"TORCH_LIBRARY" + b'"\\"' * 200_000,
        "spaces.cu": b"TORCH_LIBRARY(" + b" " * 400_000,
        "raw.cu": b"TORCH_LIBRARY(a, m) { m.def(" + b'R"a(' * 200_000,
        "bytes.h": b"\xff\xfe TORCH_LIBRARY(\xff, m) {",
        "escape.py": b"import torch\ntorch.library.custom_op('\\x1b[31m::\\ud800', f)",
    }
    for name, data in hostile.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "linked.py").symlink_to(tmp_path / "good.py")
    os.mkfifo(tmp_path / "pipe.py")
    for folder in ("tests", ".hidden"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(good)
    found = scan_tree(tmp_path)
    assert [entry.name for entry in found.entries if entry.path.endswith("good.py")] == ["good::one"]
    assert [entry.name for entry in found.entries if entry.path.endswith("escape.py")] == ["�[31m::�"]
    assert found.skipped == {
        "not valid Python": 5,
        "binary": 1,
        "over 4 MiB": 1,
        "links or special files": 2,
        "test folders": 1,
        "hidden folders": 1,
    }
    assert found.seconds < 20
    json.dumps(found.to_json())
    monkeypatch.setattr(source_tree, "MOST_FILES", 3)
    assert any("after 3 files" in reason for reason in scan_tree(tmp_path).skipped)
    with pytest.raises(UsageError, match="not a folder"):
        scan_tree(tmp_path / "good.py")


def test_nothing_is_executed(tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    (tmp_path / "a.py").write_text(f"import torch\nopen({str(proof)!r}, 'w')\ntorch.library.custom_op('a::b', f)\n")
    assert len(scan_tree(tmp_path).entries) == 1
    assert not proof.exists()


def _entries(*names: str) -> list[TreeEntry]:
    return [TreeEntry(TreeEntryKind.OPERATOR, name, "test", "", "a.py", 1) for name in names]


@pytest.mark.parametrize(
    ("operation", "same", "other"),
    [
        (
            "rms_norm",
            ["_C::rms_norm", "flashinfer::rmsnorm", "_RMSNormKernel"],
            ["gemma_rmsnorm", "rms_norm_fp8_quant"],
        ),
        ("add_rms_norm", ["x::fused_add_rms_norm", "AddRMSNormPattern"], ["_C::rms_norm", "rms_norm_add"]),
        ("swiglu", ["_C::silu_and_mul", "fuse_swiglu"], ["silu_and_mul_quant", "{NAME}", "x::{swiglu}"]),
        ("rope", ["{SPACE}::rope"], ["x::{self.rope}", "{get('x::rope')}", "x::{" + "a" * 300 + "::rope}"]),
        ("rms_norm+rope", ["fused_qk_norm_rope", "QkNormRopePattern.register.search"], ["rope", "norm_rope"]),
        ("gemm+relu", [], ["relu", "gemm", "linear"]),
    ],
)
def test_names(operation: str, same: list[str], other: list[str]) -> None:
    assert [entry.name for entry in entries_for(operation, _entries(*same, *other))] == same


def _search(entries: list[TreeEntry]) -> CandidateSearch:
    def model(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.nn.functional.conv1d(x, w, None, 1, 1, 1, 4).tanh() @ y
        return x

    args = [torch.ones(2, 4, 4), torch.ones(4, 4), torch.ones(4, 1, 3)]
    return find_candidates(program_of(model, args), entries=entries)


def test_a_candidate_with_and_without_a_tree() -> None:
    (without,) = _search([]).candidates
    assert (without.advice.support, without.advice.recommendation) == (Support.NONE, Recommendation.TRITON)
    assert without.risk is Numerics.APPROXIMATE
    (unrelated,) = _search(_entries("x::conv1d", "x::tanh")).candidates
    assert unrelated.advice == without.advice
    (found,) = _search(_entries("x::conv1d_tanh_kernel")).candidates
    assert (found.advice.support, found.advice.recommendation) == (Support.EXISTING, Recommendation.DEFER)
    assert found.to_json()["tree"][0]["name"] == "x::conv1d_tanh_kernel"
    assert "only the name matches" in found.advice.risks


def test_a_repeated_call_is_not_a_kernel_of_its_name() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = (x + y + y) @ y
        return x

    (found,) = find_candidates(program_of(model, [torch.ones(4, 4)] * 2)).candidates
    assert found.regions[0].catalog_keys[0] == "add"
    assert not advise(found.regions[0], "float32", _entries("x::add_kernel")).tree
    assert found.risk is Numerics.EXACT


def test_risk_and_order() -> None:
    """With equal savings, the kernel that exists comes first, and then the smaller risk."""

    def model(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = (x.tanh() + 1) @ y
            x = (x.erfc() * 2) @ y
            x = (x * y + 1) @ y
            x = (x.to(torch.float64) * 2).to(torch.float32) @ y
            x = torch.nn.functional.conv1d(x, w, None, 1, 1, 1, 4).abs() @ y
        return x

    args = [torch.ones(1, 4, 4), torch.ones(1, 4, 4), torch.ones(4, 1, 3)]
    found = find_candidates(program_of(model, args)).candidates
    risks = {each.name: each.risk for each in found}
    assert risks["tanh_add"] is Numerics.APPROXIMATE
    assert risks["erfc_mul"] is Numerics.APPROXIMATE
    assert risks["mul_add"] is Numerics.EXACT
    assert risks["conv1d_abs"] is Numerics.ROUNDING
    assert {risk for name, risk in risks.items() if "to" in name} == {Numerics.ROUNDING}
    names = [each.name for each in found]
    assert names.index("mul_add") < names.index("tanh_add") < names.index("conv1d_abs")


def test_support_and_risk_decide_between_similar_savings() -> None:
    (one,) = _search([]).candidates

    def variant(name: str, support: Support, risk: Numerics, launches: int) -> Candidate:
        saved = Savings(launches, 0, 0)
        return replace(one, name=name, advice=replace(one.advice, support=support), risk=risk, savings=saved)

    wanted = [
        variant("four times the savings", Support.NONE, Numerics.APPROXIMATE, 16),
        variant("callable and exact", Support.CALLABLE, Numerics.EXACT, 4),
        variant("rounding, more savings", Support.CALLABLE, Numerics.ROUNDING, 6),
        variant("rounding, less savings", Support.CALLABLE, Numerics.ROUNDING, 4),
        variant("elsewhere", Support.EXISTING, Numerics.EXACT, 7),
        variant("to be written", Support.NONE, Numerics.EXACT, 7),
        variant("saves nothing", Support.CALLABLE, Numerics.EXACT, 0),
    ]
    assert [each.name for each in rank(reversed(wanted))] == [each.name for each in wanted]


def _inlay(*arguments: str, check: int = 0) -> Result:
    run = CliRunner().invoke(app, ["candidates", *arguments], env={"COLUMNS": "120"})
    assert run.exit_code == check, run.stderr
    return run


def test_command_line_without_a_model(tmp_path: Path) -> None:
    tree = str(_tree(tmp_path))
    text = _inlay("--tree", tree).stdout
    assert "Operators: 18" in text
    assert f"  mine::plain  {tree}/pkg/ops.py:12  torch.library.custom_op  plain(x" in text
    assert "3 source files read" in text
    assert "3 names are computed" in text
    markdown = _inlay("--tree", tree, "--markdown").stdout
    assert "### Triton kernels: 2" in markdown
    assert f"| `mine::plain` | `{tree}/pkg/ops.py:12` |" in markdown
    (found,) = json.loads(_inlay("--tree", tree, "--json").stdout)["trees"]
    assert found["counts"] == {"operator": 18, "triton kernel": 2, "pattern": 6}
    assert len(found["entries"]) == 26
    assert "neither MODEL nor --tree" in _inlay(check=2).stderr
    assert "need MODEL" in _inlay("--tree", tree, "--measure", check=2).stderr
    assert "not a folder" in _inlay("--tree", f"{tree}/none", check=2).stderr


def test_command_line_with_a_model(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\ntorch.library.custom_op('x::tanh_add', f)\n")
    arguments = ("tests.models:convolutions", "--tree", str(tmp_path))
    found = json.loads(_inlay(*arguments, "--json").stdout)
    candidate = next(each for each in found["candidates"] if each["name"] == "tanh_add")
    assert [entry["line"] for entry in candidate["tree"]] == [2]
    assert (candidate["support"], candidate["numerical_risk"]) == ("callable here", "approximate")
    assert found["trees"][0]["files"] == 1
    text = _inlay(*arguments, "--markdown").stdout
    assert f"x::tanh_add (operator, {tmp_path}/a.py:2)" in text
    assert "Support: callable here" in text
    assert "Numerical risk: approximate" in text
    assert "1 source files read" in text
