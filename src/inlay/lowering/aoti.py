"""Adapter: a program without weights → a library made by AOTInductor, and what its code does to state."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_unflatten

from inlay.errors import ProgramError
from inlay.lowering.state.index_put import canonicalize_updates
from inlay.ops import native
from inlay.ops.registration import DECOMPOSITIONS, SHIMS
from inlay.program.bindings import Bindings, Role
from inlay.program.exported_program import to_exported
from inlay.program.graphs import all_nodes, target_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inlay.program.program import Program

FILLED_ROW_OPS = {"inlay.cached_attention.default"}
"""Operators that read no more of a state than the rows that hold something."""
READS_FILLED_ROWS = "filled rows"
"""What those read."""


_LEVELS: dict[str, dict[str, Any]] = {
    "native": {},
    "portable": {"cpp.march": native.TARGETS["portable"], "cpp.simdlen": 256},
}

_HEADERS = Path(__file__).parent / "headers"
_INCLUDES = "CPLUS_INCLUDE_PATH"
_ENVIRONMENT_LOCK = threading.Lock()
"""Where compilers look for headers is said by the environment, which all threads share."""

_UNSIZED = "the compiler does not say how large its results are"


@dataclass(frozen=True)
class StateAccess:
    """A kernel or call that touches a state: how many bytes it reads and writes there, as expressions of sizes."""

    state: str
    """The input that the state is."""
    kernel: str
    reads: str
    writes: str
    copies: str = ""
    """Bytes of the state that it writes somewhere else."""
    unknown: str = ""
    """Why it is not understood."""

    def to_json(self) -> dict[str, str]:
        """The access for the manifest."""
        return {key: value for key, value in vars(self).items() if value}


@dataclass(frozen=True)
class CompiledLibrary:
    """What AOTInductor made: a library without weights, its source, and the calls it leaves to torch."""

    library: bytes
    source: str
    fallback_calls: list[Any]
    constants: tuple[str, ...]
    """The names it wants its constants bound by, in the order of the program's table."""
    accesses: tuple[StateAccess, ...]


def build_library(program: Program, states: Sequence[str] = (), level: str = "native") -> CompiledLibrary:
    """Compile a program whose weights are given later, one set a container, for processors of a level.

    `states` are inputs to keep an eye on.
    """
    import torch._inductor as inductor

    program = canonicalize_updates(program)[0]
    inputs = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    examples = [inputs[row.name] for row in program.bindings.with_role(Role.INPUT)]
    args, kwargs = tree_unflatten(examples, program.call_spec.in_spec)
    watching = _AccessRecorder(program, states)
    used = {node.target for node in all_nodes(program.graph)}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = to_exported(_constants_as_buffers(program), weights=False)
        if not used.isdisjoint(DECOMPOSITIONS):
            exported = exported.run_decompositions(dict(DECOMPOSITIONS))
        options = {
            "aot_inductor.output_path": f"{folder}/piece.so",
            "aot_inductor.package_constants_in_so": False,
            # A small weight would become part of the code, and a buffer of one value a constant: pytorch#165444.
            "always_keep_tensor_constants": True,
            "joint_graph_constant_folding": False,
            "_post_fusion_custom_pass": watching,
            **_LEVELS[level],
            "aot_inductor.custom_ops_to_c_shims": {
                op: [native.declaration(op._opname, arguments, level)] for op, arguments in SHIMS.items() if op in used
            },
        }
        module: Any = exported.module(check_guards=False)
        with _lean_headers():
            inductor.aot_compile(module, args, kwargs, options=options)
        found = Path(folder)
        library = (found / "piece.so").read_bytes()
        source = next(found.glob("*.wrapper.cpp")).read_text()
        calls = next(iter(found.glob("*.wrapper.json")), None)
        nodes = json.loads(calls.read_text())["nodes"] if calls else []
    return CompiledLibrary(library, source, nodes, _constants(program, source), tuple(watching.accesses))


@contextmanager
def _lean_headers() -> Iterator[None]:
    """Wrappers without the standard library's regular expressions, which cost half of their compile time.

    Tested on torch 2.13; where torch's header uses them in another way, it gets what it asks for.
    """
    import torch

    runtime = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_runtime"
    used = [line.strip() for file in runtime.glob("*.h") for line in file.read_text().splitlines() if "regex" in line]
    known = [
        "#include <regex>",
        'std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");',
        "bool matched = std::regex_match(device_str, sm, re);",
    ]
    if used != known:
        yield
        return
    with _ENVIRONMENT_LOCK:
        before = os.environ.get(_INCLUDES)
        os.environ[_INCLUDES] = os.pathsep.join([str(_HEADERS), *([before] if before else [])])
        try:
            yield
        finally:
            if before is None:
                del os.environ[_INCLUDES]
            else:
                os.environ[_INCLUDES] = before


def _constants_as_buffers(program: Program) -> Program:
    """torch computes with constants of one element while it traces; here they have no values yet."""
    rows = (replace(row, role=Role.BUFFER) if row.role is Role.CONSTANT else row for row in program.bindings)
    return replace(program, bindings=Bindings(tuple(rows)))


def _constants(program: Program, source: str) -> tuple[str, ...]:
    """Every weight under the name the library has for it; a constant that is none of them fails the build."""
    rows = program.bindings.with_role(Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
    known: dict[str, str] = {}
    for line in source.splitlines():
        text = line.strip()
        if text.startswith("constants_info_[") and (".name = " in text or ".original_fqn = " in text):
            number, _, rest = text.removeprefix("constants_info_[").partition("]")
            known[number + rest.partition(" = ")[0]] = rest.partition(" = ")[2].strip('";')
    names = {known[f"{number}.original_fqn"]: known[f"{number}.name"] for number in _constant_indices(known)}
    strange = sorted(set(names) - {row.target for row in rows})
    if strange:
        raise ProgramError(
            f"The compiler made a constant {strange[0]} that no weight of the model is.",
            "Weights are packed by weight maps, not by the compiler: switch its freezing and packing off.",
        )
    lost = [row.target for row in rows if row.target not in names]
    if lost:
        raise ProgramError(f"The compiler did not keep {lost[0]} as a constant of its own.", "Pass it as an argument.")
    return tuple(names[row.target] for row in rows)


def _constant_indices(known: dict[str, str]) -> Iterator[str]:
    yield from dict.fromkeys(key.partition(".")[0] for key in known)


class _AccessRecorder:
    """A pass of Inductor's scheduler that changes nothing and notes who touches state."""

    def __init__(self, program: Program, states: Sequence[str]) -> None:
        rows = [row for row in program.bindings.with_role(Role.INPUT) if row.is_tensor]
        self.states = [(place, row) for place, row in enumerate(rows) if row.name in states]
        self.names = {raw: symbol.name for raw, symbol in program.symbols.items()}
        self.accesses: list[StateAccess] = []

    def __deepcopy__(self, memo: Any) -> _AccessRecorder:
        return self  # options are copied on their way, and what is noted is wanted here

    def _rename_symbols(self, text: str) -> str:
        """An expression with the names that people know for its symbols."""
        return re.sub(r"\bs\d+\b", lambda found: self.names.get(found[0], found[0]), text)

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.virtualized import V

        inputs = list(V.graph.graph_input_names)
        state = {inputs[place]: row for place, row in self.states}
        sizes = {name: V.graph.graph_inputs[name] for name in state}
        root = {name: name for name in state}
        for node in nodes:
            for buffer in node.get_outputs():
                for name in buffer.get_mutations():
                    if name in root:
                        root[buffer.get_name()] = root[name]
        for node in nodes:
            for name in state:
                access = self._access(node, name, root, sizes[name])
                if access is not None:
                    self.accesses.append(StateAccess(state[name].name, *map(self._rename_symbols, access)))
        return nodes

    def _access(self, node: Any, name: str, root: dict[str, str], held: Any) -> tuple[str, ...] | None:
        """What one kernel or call does to the state `name`."""
        reads = [dep for dep in node.read_writes.reads if root.get(dep.name) == name]
        writes = [dep for dep in node.read_writes.writes if root.get(dep.name) == name]
        if not reads and not writes:
            return None
        width = held.get_dtype().itemsize
        whole = math.prod([1, *held.get_size()]) * width
        kernel = node.node if node.is_extern() else None
        operator = getattr(kernel, "op_overload", None)
        by = target_text(operator) if operator is not None else _label(node)
        if kernel is not None:
            return self._call(node, by, operator, bool(writes), str(whole))
        # A kernel that writes to a state depends on all of it, for the order of things; what it reads it names.
        read = [_bytes(dep, width) for dep in reads if hasattr(dep, "size")]
        if any(not hasattr(dep, "size") for dep in reads) and not writes:
            return by, "", "", "", "it reads the state in a way the compiler does not name"
        written = [_bytes(dep, width) for dep in writes if hasattr(dep, "size")]
        if len(written) < len(writes):
            return by, "", "", "", "it writes to the state in a way the compiler does not name"
        elsewhere = self._writes_elsewhere(node, root, whole) if read else False
        if elsewhere is None:
            return by, "", "", "", _UNSIZED
        return by, " + ".join(read), " + ".join(written), str(whole) if elsewhere else "", ""

    def _call(self, node: Any, by: str, operator: Any, writes: bool, whole: str) -> tuple[str, ...]:
        """A call that is left to torch."""
        if operator is None:
            return by, "", "", "", "a call that is no operator of torch"
        if writes:
            return by, "", "", "", "an operator that writes to the state itself"
        if by in FILLED_ROW_OPS:
            return by, READS_FILLED_ROWS, "", "", ""
        elsewhere = self._writes_elsewhere(node, {}, int(whole) if whole.isdigit() else 0)
        if elsewhere is None:
            return by, "", "", "", _UNSIZED
        return by, whole, "", whole if elsewhere else "", ""

    def _writes_elsewhere(self, node: Any, root: dict[str, str], whole: Any) -> bool | None:
        """Whether something at least as large as the state, which is none, is written; None when that is not known."""
        from torch._inductor.virtualized import V

        written = [each for each in node.get_outputs() if each.get_name() not in root and not each.get_mutations()]
        for buffer in written:
            # A call with several results has a buffer without a size, and a part for each result.
            parts = getattr(buffer.node, "outputs", None) or [buffer.node]
            try:
                sizes = [math.prod([1, *each.get_size()]) * each.get_dtype().itemsize for each in parts]
            except (AttributeError, NotImplementedError, AssertionError):
                return None
            if not all(V.graph.sizevars.statically_known_lt(size, whole) for size in sizes):
                return True
        return False


def _label(node: Any) -> str:
    """What a kernel computes, from the calls it was made of."""
    names = [target_text(each.target) for part in node.get_nodes() for each in getattr(part.node, "origins", ())]
    return f"kernel({', '.join(sorted(set(names)))})"


def _bytes(dep: Any, width: int) -> str:
    return str(math.prod([1, *dep.size]) * width)
