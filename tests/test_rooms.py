"""Rules about the source itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "inlay"
pytestmark = pytest.mark.fast

PRIVATE = {
    "torch._subclasses": {"capture/fake.py", "program/symbols.py"},
    "torch._dispatch": {"program/symbols.py"},
    "torch.fx.experimental.symbolic_shapes": {"program/symbols.py"},
    "torch._dynamo.source": {"program/symbols.py"},
    "torch.fx.experimental._config": {"program/sizes.py"},
    "torch.fx.experimental.proxy_tensor": {"program/trace.py"},
    "torch._library": {"program/literals.py"},
    "torch._logging": {"transforms/structured_trace.py"},
    "torch.utils._sympy": {"program/exported.py"},
    "torch._export": {"program/functional.py", "program/decompose.py"},
    "torch._inductor": {
        *("rewrite/trees.py", "compile/below.py", "compile/post_grad.py", "compile/aoti.py"),
        "testing/compiler.py",
    },
    "torch._C": {"compile/native.py"},
    "torch._guards": {"rewrite/trees.py"},
    "torch._dynamo": {"program/symbols.py", "program/exclusive.py", "testing/compiler.py", "compile/below.py"},
    "torch._functorch": {"testing/compiler.py"},
    "torch.compiler._cache": {"testing/compiler.py"},
    "transformers.modeling_gguf_pytorch_utils": {"capture/hf_gguf.py"},
    "transformers.core_model_loading": {"capture/hf_weights.py"},
    "transformers.conversion_mapping": {"capture/hf_weights.py"},
    "transformers.initialization": {"capture/hf.py"},
    "transformers.cache_utils": {"capture/hf_cache.py"},
}
"""Private API → the only files that may import it. What breaks when it changes is in tests/test_adapters.py."""


def _strings(tree: ast.AST) -> list[str]:
    documented = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [str(node.value) for node in constants if node not in documented]


def test_no_code_knows_a_model() -> None:
    """No string in the source is, or holds as a word, the name of an architecture."""
    from transformers import CONFIG_MAPPING

    known = set(CONFIG_MAPPING.keys()) - {"module", "text", "audio"}
    for file in SOURCE.rglob("*.py"):
        for string in _strings(ast.parse(file.read_text())):
            found = known & set(re.findall(r"[a-z0-9_-]+", string.lower()))
            assert not found, f"{file.name}: {found} in {string!r}"


def test_private_api_has_one_home() -> None:
    for file in SOURCE.rglob("*.py"):
        here = file.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                homes = [files for private, files in PRIVATE.items() if name.startswith(private)]
                assert all(here in files for files in homes), f"{here} imports {name}"
                if re.match(r"torch\._(?!ops)", name):
                    assert homes, f"{here} imports {name}, which is private and has no home"


def test_no_file_is_long() -> None:
    """Files are split by concept; one of this length holds several."""
    long = {file.name: lines for file in SOURCE.rglob("*.py") if (lines := len(file.read_text().splitlines())) > 400}
    assert not long
