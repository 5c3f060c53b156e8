"""Adapter: compile a program without weights with AOTInductor, and record how its code accesses state.

Tested on torch 2.13 to 2.15.
"""

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
from inlay.lowering.buckets import READS_FILLED_ROWS
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
"""Operators that read only the filled rows of a state."""

_LEVELS: dict[str, dict[str, Any]] = {
    "native": {},
    "portable": {"cpp.march": native.TARGETS["portable"], "cpp.simdlen": 256},
}

_HEADERS = Path(__file__).parent / "headers"
_INCLUDES = "CPLUS_INCLUDE_PATH"
_ENVIRONMENT_LOCK = threading.Lock()
"""Guards the include path, an environment variable that all threads share."""

_UNSIZED = "the compiler does not report the size of its results"


@dataclass(frozen=True)
class StateAccess:
    """A kernel or call that accesses a state: the bytes that it reads and writes there, as expressions of sizes."""

    state: str
    """The name of the input that is the state."""
    kernel: str
    reads: str
    writes: str
    copies: str = ""
    """Bytes of the state that it writes to another buffer."""
    unknown: str = ""
    """Why the access cannot be analyzed; empty if it can."""

    def to_json(self) -> dict[str, str]:
        """Return the access as a JSON object for the manifest."""
        return {key: value for key, value in vars(self).items() if value}


@dataclass(frozen=True)
class CompiledLibrary:
    """The output of AOTInductor: a library without weights, its source, and the calls that fall back to torch."""

    library: bytes
    source: str
    fallback_calls: list[Any]
    constants: tuple[str, ...]
    """The names under which its constants are bound, in the order of the binding table."""
    accesses: tuple[StateAccess, ...]


def build_library(
    program: Program, states: Sequence[str] = (), level: str = "native", threads: int = -1
) -> CompiledLibrary:
    """Compile a program for processors of a level. Weights are bound later, one set per container.

    `states` are the inputs whose accesses are recorded. `threads` fixes the number of threads of parallel loops.
    """
    import torch
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
            # Otherwise a small weight becomes part of the code, and a buffer of one value a constant: pytorch#165444.
            "always_keep_tensor_constants": True,
            "joint_graph_constant_folding": False,
            "_post_fusion_custom_pass": watching,
            "cpp.threads": threads,
            **_LEVELS[level],
            "aot_inductor.custom_ops_to_c_shims": {
                op: [native.declaration(op._opname, arguments, level)] for op, arguments in SHIMS.items() if op in used
            },
        }
        module: Any = exported.module(check_guards=False)
        with _lean_headers():
            inductor.aot_compile(module, args, kwargs, options=options)
        found = Path(folder)
        if threads < 0 and any("_arr[tid]" in file.read_text() for file in found.glob("*.kernel.cpp")):
            # torch 2.13 allocates partial sums of a parallel reduction for the threads of the build, but any number of
            # threads may run it: more would write out of bounds.
            return build_library(program, states, level, torch.get_num_threads())
        library = (found / "piece.so").read_bytes()
        source = next(found.glob("*.wrapper.cpp")).read_text()
        calls = next(iter(found.glob("*.wrapper.json")), None)
        nodes = json.loads(calls.read_text())["nodes"] if calls else []
    return CompiledLibrary(library, source, nodes, _constants(program, source), tuple(watching.accesses))


@contextmanager
def _lean_headers() -> Iterator[None]:
    """Replace the <regex> header while wrappers compile: it takes half of their compile time.

    If torch's headers use regular expressions in another way, the real header is used.
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
    """Turn constants into buffers: torch evaluates one-element constants while tracing, and they have no values yet."""
    rows = (replace(row, role=Role.BUFFER) if row.role is Role.CONSTANT else row for row in program.bindings)
    return replace(program, bindings=Bindings(tuple(rows)))


def _constants(program: Program, source: str) -> tuple[str, ...]:
    """Return the library's name of every weight; raise for a constant that is not a weight, and for a missing one."""
    rows = program.bindings.with_role(Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
    known: dict[str, str] = {}
    for line in source.splitlines():
        text = line.strip()
        if text.startswith("constants_info_[") and (".name = " in text or ".original_fqn = " in text):
            number, _, rest = text.removeprefix("constants_info_[").partition("]")
            known[number + rest.partition(" = ")[0]] = rest.partition(" = ")[2].strip('";')
    numbers = {key.partition(".")[0] for key in known}
    names = {known[f"{number}.original_fqn"]: known[f"{number}.name"] for number in numbers}
    strange = sorted(set(names) - {row.target for row in rows})
    if strange:
        raise ProgramError(
            f"The compiler created a constant {strange[0]} that is not a weight of the model.",
            "Turn off freezing and packing in the compiler: weight maps pack the weights.",
        )
    lost = [row.target for row in rows if row.target not in names]
    if lost:
        raise ProgramError(f"The compiler did not keep {lost[0]} as a separate constant.", "Pass it as an argument.")
    return tuple(names[row.target] for row in rows)


class _AccessRecorder:
    """A scheduler pass of Inductor that changes nothing and records which kernels access state."""

    def __init__(self, program: Program, states: Sequence[str]) -> None:
        rows = [row for row in program.bindings.with_role(Role.INPUT) if row.is_tensor]
        self.states = [(place, row) for place, row in enumerate(rows) if row.name in states]
        self.names = {raw: symbol.name for raw, symbol in program.symbols.items()}
        self.accesses: list[StateAccess] = []

    def __deepcopy__(self, memo: Any) -> _AccessRecorder:
        return self  # Inductor copies its options; the accesses must be recorded in this object

    def _rename_symbols(self, text: str) -> str:
        """Return an expression with the user's names of its symbols."""
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
        """Return how one kernel or call accesses the state `name`, or None if it does not."""
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
        # A kernel that writes to a state has an ordering dependency on all of it; its real reads have a size.
        read = [_bytes(dep, width) for dep in reads if hasattr(dep, "size")]
        if any(not hasattr(dep, "size") for dep in reads) and not writes:
            return by, "", "", "", "it reads an unknown part of the state"
        written = [_bytes(dep, width) for dep in writes if hasattr(dep, "size")]
        if len(written) < len(writes):
            return by, "", "", "", "it writes to an unknown part of the state"
        elsewhere = self._writes_elsewhere(node, root, whole) if read else False
        if elsewhere is None:
            return by, "", "", "", _UNSIZED
        return by, " + ".join(read), " + ".join(written), str(whole) if elsewhere else "", ""

    def _call(self, node: Any, by: str, operator: Any, writes: bool, whole: str) -> tuple[str, ...]:
        """Return how a call that falls back to torch accesses a state."""
        if operator is None:
            return by, "", "", "", "a call that is not a torch operator"
        if writes:
            return by, "", "", "", "an operator that writes to the state directly"
        if by in FILLED_ROW_OPS:
            return by, READS_FILLED_ROWS, "", "", ""
        elsewhere = self._writes_elsewhere(node, {}, int(whole) if whole.isdigit() else 0)
        if elsewhere is None:
            return by, "", "", "", _UNSIZED
        return by, whole, "", whole if elsewhere else "", ""

    def _writes_elsewhere(self, node: Any, root: dict[str, str], whole: Any) -> bool | None:
        """Whether a buffer that is not a state, and at least as large as the state, is written; None if unknown."""
        from torch._inductor.virtualized import V

        written = [each for each in node.get_outputs() if each.get_name() not in root and not each.get_mutations()]
        for buffer in written:
            # The buffer of a call with several results has no size; each result has its own buffer.
            parts = getattr(buffer.node, "outputs", None) or [buffer.node]
            try:
                sizes = [math.prod([1, *each.get_size()]) * each.get_dtype().itemsize for each in parts]
            except (AttributeError, NotImplementedError, AssertionError):
                return None
            if not all(V.graph.sizevars.statically_known_lt(size, whole) for size in sizes):
                return True
        return False


def _label(node: Any) -> str:
    """Return a label of a kernel: the operators that it was fused from."""
    names = [target_text(each.target) for part in node.get_nodes() for each in getattr(part.node, "origins", ())]
    return f"kernel({', '.join(sorted(set(names)))})"


def _bytes(dep: Any, width: int) -> str:
    return str(math.prod([1, *dep.size]) * width)
