"""Rules about the source itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from inlay.machine import TESTED_TORCH

SOURCE = Path(__file__).parents[1] / "src" / "inlay"
pytestmark = pytest.mark.fast

PRIVATE = {
    "torch._subclasses": {"frontend/fake_tensors.py", "program/symbols.py"},
    "torch._dispatch": {"program/symbols.py"},
    "torch.fx.experimental.symbolic_shapes": {"program/symbols.py"},
    "torch._dynamo.source": {"program/symbols.py"},
    "torch.fx.experimental._config": {"program/size_specialization.py"},
    "torch.fx.experimental.proxy_tensor": {"program/tracer.py"},
    "torch._library": {"program/text/literals.py"},
    "torch._logging": {"transforms/structured_trace.py"},
    "torch.utils._sympy": {"program/exported_program.py"},
    "torch._export": {"program/functionalization.py", "program/decomposition.py"},
    "torch._inductor": {
        *("rewrite/pattern_trees.py", "lowering/inner_backend.py", "integrations/post_grad.py", "lowering/aoti.py"),
        "testing/compiler.py",
    },
    "torch._C": {"lowering/aoti_runtime.py"},
    "torch._guards": {"rewrite/pattern_trees.py"},
    "torch._dynamo": {
        "program/symbols.py",
        "program/tracing_lock.py",
        "testing/compiler.py",
        "lowering/inner_backend.py",
    },
    "torch._functorch": {"testing/compiler.py"},
    "torch.compiler._cache": {"testing/compiler.py"},
    "transformers.modeling_gguf_pytorch_utils": {"frontend/gguf/conversion.py"},
    "transformers.core_model_loading": {"frontend/huggingface/weight_conversion.py"},
    "transformers.conversion_mapping": {"frontend/huggingface/weight_conversion.py"},
    "transformers.cache_utils": {"frontend/huggingface/static_cache.py"},
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

    known = set(CONFIG_MAPPING.keys()) - {"module", "text", "audio", "git"}
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


def test_adapters_state_their_versions() -> None:
    """A file that imports private API of torch says on which versions it was tested; docs/versions.md has the runs."""
    oldest, newest = TESTED_TORCH
    for home in sorted(set().union(*(files for name, files in PRIVATE.items() if name.startswith("torch")))):
        stated = ast.get_docstring(ast.parse((SOURCE / home).read_text())) or ""
        assert f"Tested on torch {oldest} to {newest}." in stated, home
    major, minor = newest.split(".")
    wanted = f'"torch>={oldest},<{major}.{int(minor) + 1}"'
    assert wanted in (SOURCE.parents[1] / "pyproject.toml").read_text()


def test_no_file_is_long() -> None:
    """Files are split by concept; one of this length holds several."""
    long = {file.name: lines for file in SOURCE.rglob("*.py") if (lines := len(file.read_text().splitlines())) > 500}
    assert not long


MUTATIONS = {
    *("replace_all_uses_with", "replace_input_with", "erase_node", "eliminate_dead_code", "inserting_after"),
    *("call_function", "call_method", "create_node", "node_copy", "graph_copy", "insert_arg", "update_arg"),
    *("update_kwarg", "_update_args_kwargs"),
}
OWNED = ("args", "kwargs", "meta", "target", "op")


def _mutations(tree: ast.AST) -> list[int]:
    """Lines that change a graph: methods that do, called or handed on, and what is assigned to or deleted of nodes."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr):
            continue
        inner = node.value if isinstance(node, ast.Subscript) else node
        is_written = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        is_own = isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
        if is_written and isinstance(inner, ast.Attribute) and inner.attr in OWNED and not is_own:
            found.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in MUTATIONS:
            found.append(node.lineno)
        if re.fullmatch(
            r".*\.meta\.(update|pop|setdefault|clear)", ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        ):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "text",
    [
        *("node.args, node.kwargs = (), {}", "node.target = f", "node.meta['val'] = x", "node.meta |= x"),
        *("del node.meta['val']", "node.meta.update(x)", "erase = graph.erase_node", "node.meta.pop('val')"),
        *("graph.call_function(f)", "node.args += (x,)", "with graph.inserting_after(node): pass"),
    ],
)
def test_mutations_are_seen(text: str) -> None:
    assert _mutations(ast.parse(text))


def test_transforms_change_graphs_through_the_rewriter() -> None:
    states = [
        SOURCE / "lowering" / "state" / f"{name}.py" for name in ("in_place_writes", "index_put", "returned_parts")
    ]
    files = [*sorted((SOURCE / "transforms").rglob("*.py")), *states]
    assert len(files) > 20
    wrong = {file.name: lines for file in files if (lines := _mutations(ast.parse(file.read_text())))}
    assert not wrong, wrong
    assert _mutations(ast.parse((SOURCE / "rewrite" / "rewriter.py").read_text())), "the rule sees no mutation at all"
