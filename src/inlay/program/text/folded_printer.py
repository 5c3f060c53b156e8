"""The folded text form: repeated blocks written once, single-use values inlined, source lines in comments.

It is valid Python: `model` is the captured module (or an object with its attributes), and each block is a function.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import groupby, pairwise
from textwrap import wrap
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.program.bindings import Role
from inlay.program.fold import BlockKind, Folds, Occurrence, fold, layer_path
from inlay.program.gc_pause import pause_gc
from inlay.program.graphs import SOURCE, all_graphs, all_nodes, is_mutation, operands
from inlay.program.text.expressions import Expression, express
from inlay.program.text.literals import Owner, find_owners, literal, namespace, path_text
from inlay.program.text.printer import HEADER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from inlay.program.bindings import Binding
    from inlay.program.program import Program


_MODEL_ROLES = (Role.PARAMETER, Role.BUFFER)
_MAX_CONSTANT_VALUES = 64
_UNLIMITED = 1_000_000
_DIFF_INLINE_LENGTH = 30
"""Statements of a diff are short, so that a line contains one difference."""
_INLINE_LENGTH = 72
"""A value that is used once is inlined if its text is at most this long."""


@pause_gc()
def dump_folded(program: Program, *, width: int = 120, folds: Folds | None = None) -> str:
    """Return the text of a program with its repeated blocks written once."""
    return "\n".join(_FoldedPrinter(program, folds or fold(program), width, _INLINE_LENGTH).lines()) + "\n"


def comparison_lines(program: Program, folds: Folds, names: Mapping[fx.Node, str]) -> list[str]:
    """Return the folded form for a diff: renamed nodes, one line for each statement, types but no source lines."""
    return list(_FoldedPrinter(program, folds, _UNLIMITED, _DIFF_INLINE_LENGTH, names, types_only=True).lines())[1:]


class _FoldedPrinter:
    def __init__(
        self,
        program: Program,
        folds: Folds,
        width: int,
        inline: int,
        renamed: Mapping[fx.Node, str] | None = None,
        *,
        types_only: bool = False,
    ) -> None:
        self.program, self.folds, self.width = program, folds, width
        self.max_inline, self.node_names, self.types_only = inline, renamed or {}, types_only
        self.sizes = {symbol.name for symbol in program.symbols.values()}
        self.rows = {row.name: row for row in program.bindings.ins}
        self.kind_names = {
            kind: kind.name or block_name(index, len(folds.kinds)) for index, kind in enumerate(folds.kinds)
        }
        files = Counter(
            node.meta[SOURCE].partition(":")[0] for node in all_nodes(program.graph) if node.meta.get(SOURCE)
        )
        self.file = files.most_common(1)[0][0] if files else ""
        self.constants = _shared_constants(program)
        inputs = [row.name for row in program.bindings.with_role(Role.INPUT)]
        self.root, self.layer = unique_name("model", inputs), unique_name("w", inputs)
        self.block_parameters = {kind: _BlockParameters(kind, self) for kind in folds.kinds}

    def lines(self) -> Iterator[str]:
        yield f"{HEADER} (folded): {self.program.name}, {len(self.program)} nodes" + (
            f"; lines of {self.file}" if self.file else ""
        )
        yield "import torch"
        targets = [node.target for node in all_nodes(self.program.graph) if node.op == "call_function"]
        for space in sorted({namespace(target) for target in targets} - {"torch"}):
            yield f"import {space}" if space in ("math", "operator", "builtins") else f"{space} = torch.ops.{space}"
        if any(not math.isfinite(value) for value in _floats(self.program)):
            yield "from math import inf, nan"
        for name in dict.fromkeys(self.constants.values()):
            yield from _constant_lines(name, self.program.tensors[name].read(), self.width)
        for name, graph in list(all_graphs(self.program.graph))[1:]:
            parameters = [node.name for node in graph.nodes if node.op == "placeholder"]
            yield from self._function(name, parameters, self._plain(graph, f"{name}__"))
        for kind in self.folds.kinds:
            yield from self._block(kind)
        inputs = [row.name for row in self.program.bindings.with_role(Role.INPUT)]
        yield from self._function("forward", [self.root, *inputs], self._forward())

    def _function(self, name: str, parameters: Sequence[str], body: Iterable[Line], note: str = "") -> Iterator[str]:
        yield ""
        for line in wrap_statement(f"def {name}", f"({', '.join(parameters)})", self.width - 1, note):
            yield self._fit(Line(f"{line.code}:" if line.code.endswith(")") else line.code, line.note))
        for line in body:
            yield self._fit(Line(f"    {line.code}", line.note))

    def _fit(self, line: Line) -> str:
        """Append the note as a comment, shortened or dropped to fit the width."""
        if not line.note:
            return line.code
        if self.types_only:
            return f"{line.code}  # {line.note.partition(' | ')[0]}"
        column = max(len(line.code) + 2, self.width * 62 // 100)
        for note in (line.note, line.note.partition(" | ")[0]):
            if column + 2 + len(note) <= self.width:
                return f"{line.code:<{column}}# {note}"
            if len(line.code) + 4 + len(note) <= self.width:
                return f"{line.code:<{self.width - 2 - len(note)}}# {note}"
        return line.code

    # -- statements ------------------------------------------------------------------------------------------------

    def _note(self, node: fx.Node) -> str:
        type_text = self.program.types.text(node.meta.get("val"))
        source = node.meta.get(SOURCE, "")
        file, _, line = source.partition(":")
        shown = f":{line}" if file == self.file else source
        return f"{type_text} | {shown}" if shown else type_text

    def _name(self, node: fx.Node) -> str:
        """Return the symbol of a size, the path of a weight in the model, or else the name of the node."""
        if node.op == "placeholder":
            row = self.rows.get(node.name)
            if row is None or row.role not in _MODEL_ROLES:
                return self.constants.get(node.name, node.name)
            return path_text(self.root, row)
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and (size := self.program.types.text(value)) in self.sizes:
            return size
        return self.node_names.get(node, node.name)

    def _statements(
        self, nodes: Sequence[fx.Node], names: dict[fx.Node, Expression], keep: set[fx.Node], prefix: str = ""
    ) -> Iterator[Line]:
        """Yield statements for `nodes`; values that are used once are inlined unless they are in `keep`."""
        scope = set(nodes)
        budget = self.width - 6

        def operand(node: fx.Node) -> Expression:
            return names[node] if node in names else Expression(self._name(node))

        def stays(node: fx.Node, text: Expression) -> bool:
            users = list(node.users)
            once = len(users) == 1 and users[0] in scope and operands(users[0]).count(node) == 1
            return not once or node in keep or len(text.text) > self.max_inline or is_mutation(node)

        for node in nodes:
            if node.op == "get_attr":
                names[node] = Expression(prefix + str(node.target).replace(".", "_"))
                continue
            text = express(node, operand)
            name = self._name(node)
            if stays(node, text):
                names[node] = Expression(name)
                yield from wrap_statement(f"{name} = ", text.text, budget, self._note(node))
            else:
                names[node] = text

    def _plain(self, graph: fx.Graph, prefix: str) -> Iterator[Line]:
        names: dict[fx.Node, Expression] = {
            node: Expression(node.name) for node in graph.nodes if node.op == "placeholder"
        }
        body = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        yield from self._statements(body, names, set(), prefix)
        yield self._return(graph, names)

    def _return(self, graph: fx.Graph, names: Mapping[fx.Node, Expression]) -> Line:
        returned = graph.output_node().args[0]
        return Line(f"return {literal(returned, lambda node: _lookup_name(names, node, self._name(node)))}")

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _block(self, kind: BlockKind) -> Iterator[str]:
        slots = self.block_parameters[kind]
        first = kind.example
        names = {node: Expression(slots.input_names[index]) for index, node in enumerate(first.inputs)}
        outputs = [first.nodes[position] for position in kind.output_positions]
        body = list(self._statements(first.nodes, names, set(outputs)))
        returned = ", ".join(names[node].text for node in outputs)
        owners = list(slots.owners.values())
        where = f" | {owners[0].text} … {owners[-1].text}" if owners else ""
        note = f"× {len(kind)}{where}"
        yield from self._function(self.kind_names[kind], slots.parameters, [*body, Line(f"return {returned}")], note)

    def _forward(self) -> Iterator[Line]:
        graph = self.program.graph
        body = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        place = {node: index for index, node in enumerate(body)}
        names: dict[fx.Node, Expression] = {}
        inside = {node for kind in self.folds.kinds for each in kind.occurrences for node in each.nodes}
        keep = {node for kind in self.folds.kinds for each in kind.occurrences for node in each.inputs}
        at = 0
        for kind, occurrences in self._runs():
            # Sizes that are computed within a block do not belong to it; they are written before it.
            end = place[occurrences[-1].nodes[-1]] + 1
            yield from self._statements([node for node in body[at:end] if node not in inside], names, keep)
            yield from self._calls(kind, occurrences, names)
            at = end
        yield from self._statements(body[at:], names, keep)
        yield self._return(graph, names)

    def _runs(self) -> Iterator[tuple[BlockKind, list[Occurrence]]]:
        for kind, occurrences in _adjacent_runs(self.folds):
            if _is_loop(occurrences, self.block_parameters[kind]):
                yield kind, occurrences
            else:
                yield from ((kind, [each]) for each in occurrences)

    def _calls(
        self, kind: BlockKind, occurrences: Sequence[Occurrence], names: dict[fx.Node, Expression]
    ) -> Iterator[Line]:
        """Yield the calls of a block, as a loop over the differing arguments if there are several occurrences."""
        slots = self.block_parameters[kind]
        first, last = occurrences[0], occurrences[-1]
        named = kind.example if len(occurrences) > 1 else first
        outputs = {position: self._name(named.nodes[position]) for position in kind.output_positions}
        loop = [slots.owners[each] for each in occurrences] if slots.owners else []
        over = {self.layer: _layers_text(loop)} if loop else {}
        arguments = [self.layer] if loop else []
        for index in range(len(first.inputs)):
            if slots.input_names[index] not in slots.parameters:
                continue
            values = [_lookup_name(names, each.inputs[index], self._name(each.inputs[index])) for each in occurrences]
            position = slots.carried_position(index, occurrences)
            if position is not None:
                yield Line(f"{outputs[position]} = {values[0]}")
                arguments.append(outputs[position])
            elif len(set(values)) == 1:
                arguments.append(values[0])
            else:
                over[f"{slots.input_names[index]}_each"] = sequence_text(values)
                arguments.append(f"{slots.input_names[index]}_each")
        if loop and len(occurrences) == 1:
            arguments[0] = loop[0].text
        results, call = f"{', '.join(outputs.values())} = ", f"{self.kind_names[kind]}({', '.join(arguments)})"
        if len(occurrences) == 1:
            yield from wrap_statement(results, call, self.width - 4)
        else:
            source = next(iter(over.values())) if len(over) == 1 else f"zip({', '.join(over.values())})"
            head = f"for {', '.join(over)} in {source}:" if over else f"for _ in range({len(occurrences)}):"
            yield from wrap_loop_head(head, self.width - 6, f"× {len(occurrences)}")
            yield from (Line(f"    {line.code}") for line in wrap_statement(results, call, self.width - 8))
        names.update({last.nodes[position]: Expression(name) for position, name in outputs.items()})


def _shared_constants(program: Program) -> dict[str, str]:
    """Map each constant to the first one with the same value; layers have copies of the same number."""
    first: dict[tuple[str, str, bytes], str] = {}
    names: dict[str, str] = {}
    for row in program.bindings.with_role(Role.CONSTANT):
        value = program.tensors[row.name].read().detach().cpu().contiguous()
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        names[row.name] = first.setdefault((str(value.dtype), str(tuple(value.shape)), content), row.name)
    return names


def _constant_lines(name: str, value: torch.Tensor, width: int) -> Iterator[str]:
    if value.numel() > _MAX_CONSTANT_VALUES:
        yield f"{name} = ...  # {value.dtype} {tuple(value.shape)}: see the full form"
        return
    text = f"torch.tensor({literal(value.tolist())}, dtype={value.dtype})"
    for line in wrap_statement(f"{name} = ", text, width):
        yield line.code


def _floats(program: Program) -> Iterator[float]:
    """Yield every float that the text may contain."""
    for node in all_nodes(program.graph):
        yield from (value for value in tree_leaves((node.args, dict(node.kwargs))) if isinstance(value, float))
    for row in program.bindings.with_role(Role.CONSTANT):
        value = program.tensors[row.name].read()
        if value.is_floating_point() and value.numel() <= _MAX_CONSTANT_VALUES:
            yield from value.reshape(-1).tolist()


def _is_loop(occurrences: Sequence[Occurrence], slots: _BlockParameters) -> bool:
    """Whether a run can be written as a loop: only the next block reads each block, through the same inputs."""
    carried = [slots.carried_position(index, occurrences) for index in range(len(occurrences[0].inputs))]
    for before, after in pairwise(occurrences):
        inside, following = set(before.nodes), set(after.nodes)
        for node in before.outputs:
            if any(user not in inside and user not in following for user in node.users):
                return False
        received = [index for index, node in enumerate(after.inputs) if node in inside]
        if any(carried[index] is None for index in received):
            return False
    positions = [position for position in carried if position is not None]
    return len(positions) == len(set(positions))


def _adjacent_runs(folds: Folds) -> list[tuple[BlockKind, list[Occurrence]]]:
    """Return occurrences in program order; adjacent occurrences of the same kind form one run."""
    runs: list[tuple[BlockKind, list[Occurrence]]] = []
    for kind, _, each in folds.iter_occurrences():
        if runs and runs[-1][0] is kind and runs[-1][1][-1].start + kind.size == each.start:
            runs[-1][1].append(each)
        else:
            runs.append((kind, [each]))
    return runs


class _BlockParameters:
    """The parameters of a block: layer weights as `w`, values carried from block to block, shared values by name."""

    def __init__(self, kind: BlockKind, writer: _FoldedPrinter) -> None:
        rows = [[writer.rows.get(node.name) for node in each.inputs] for each in kind.occurrences]
        weights = [
            index
            for index, row in enumerate(rows[0])
            if row is not None and row.role in _MODEL_ROLES and _is_layer_weight([each[index] for each in rows])
        ]
        found = find_owners([[row for index in weights if (row := each[index])] for each in rows], writer.root)
        self.owners: dict[Occurrence, Owner] = dict(zip(kind.occurrences, found, strict=True)) if found else {}
        elsewhere = {node for each in kind.occurrences for node in each.nodes} if kind.shown_index else set()
        self.input_names: list[str] = []
        self.parameters: list[str] = [writer.layer] if found else []
        for index, node in enumerate(kind.example.inputs):
            row = rows[kind.shown_index][index]
            if found and index in weights and row is not None:
                self.input_names.append(found[kind.shown_index].relative_path(writer.layer, row))
            else:
                name = node.name if row is not None and row.role in _MODEL_ROLES else writer._name(node)
                if node in elsewhere:
                    name = f"in_{index}"  # the output of a block that is not shown
                self.input_names.append(name)
                constants = {writer.constants.get(each.inputs[index].name, "") for each in kind.occurrences}
                if len(constants) != 1 or "" in constants:
                    self.input_names[-1] = name = unique_name(name, self.parameters)
                    self.parameters.append(name)

    def carried_position(self, index: int, occurrences: Sequence[Occurrence]) -> int | None:
        """Return the position in a block whose value is this input of the next occurrence, or None."""
        positions = set()
        for before, after in pairwise(occurrences):
            node = after.inputs[index]
            positions.add(before.nodes.index(node) if node in before.nodes else -1)
        return positions.pop() if len(positions) == 1 and -1 not in positions else None


def _is_layer_weight(rows: Sequence[Binding | None]) -> bool:
    """Whether a weight belongs to a layer: it differs between occurrences, or its path contains an index."""
    return len(set(rows)) > 1 or (len(rows) == 1 and rows[0] is not None and bool(layer_path(rows[0].target)))


def block_name(index: int, count: int) -> str:
    """Return the function name of a kind.

    >>> block_name(0, 1), block_name(1, 2)
    ('block', 'block_b')
    """
    return "block" if count == 1 else f"block_{chr(ord('a') + index) if index < 26 else index}"


def _lookup_name(names: Mapping[fx.Node, Expression], node: fx.Node, default: str) -> str:
    return names[node].text if node in names else default


def _layers_text(owners: Sequence[Owner]) -> str:
    """Return the layers of a run, as a slice of their module list if they are in one."""
    first, last = owners[0], owners[-1]
    one_list = first.list_path and all(owner.list_path == first.list_path for owner in owners)
    if one_list and [owner.number for owner in owners] == list(range(first.number, last.number + 1)):
        return f"{first.list_path}[{first.number}:{last.number + 1}]"
    return f"({', '.join(owner.text for owner in owners)},)"


@dataclass(frozen=True)
class Line:
    """One line of a statement: its code and its comment."""

    code: str
    note: str = ""


def sequence_text(values: Sequence[str]) -> str:
    """Return a tuple of names as source, with repetitions written as `*`.

    >>> sequence_text(["a", "a", "b"] * 3 + ["a"])
    '((a,) * 2 + (b,)) * 3 + (a,)'
    """
    length = len(values)
    for period in range(1, length + 1):
        if all(values[index] == values[index % period] for index in range(length)):
            break
    repeats, tail = divmod(length, period)
    body = _runs_text(values[:period])
    text = body if repeats == 1 else f"({body}) * {repeats}"
    return f"{text} + {_runs_text(values[:tail])}" if tail else text


def _runs_text(values: Sequence[str]) -> str:
    parts = [(value, len(list(group))) for value, group in groupby(values)]
    return " + ".join(f"({value},) * {count}" if count > 1 else f"({value},)" for value, count in parts)


def wrap_statement(head: str, text: str, budget: int, note: str = "") -> Iterator[Line]:
    """Yield a statement on one line, or broken at spaces inside brackets if it does not fit."""
    if len(head) + len(text) <= budget:
        yield Line(head + text, note)
        return
    opening = _last_bracket(text) if text.endswith(")") else -1
    before, inside, after = (text[: opening + 1], text[opening + 1 : -1], ")") if opening >= 0 else ("(", text, ")")
    if len(head) + len(before) > budget:
        before, inside = "(", text
    yield Line(head + before, note)
    for line in wrap(inside, max(budget - 4, 20), break_long_words=False, break_on_hyphens=False):
        yield Line("    " + line)
    yield Line(after)


def wrap_loop_head(head: str, budget: int, note: str) -> Iterator[Line]:
    """Yield the first line of a loop, broken if it does not fit."""
    variables, _, source = head.removesuffix(":").partition(" in ")
    if len(variables) + len(" in zip(") > budget:
        *lines, last = wrap_statement("for ", f"({variables.removeprefix('for ')})", budget)
        yield from lines
        variables = last.code
    *lines, last = wrap_statement(f"{variables} in ", source, budget - 1, note)
    yield from lines
    yield Line(f"{last.code}:", last.note)


def _last_bracket(text: str) -> int:
    """Return the position of the bracket that closes at the end of `text`, or -1."""
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += {")": 1, "]": 1, "}": 1, "(": -1, "[": -1, "{": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return -1


def unique_name(name: str, taken: Sequence[str]) -> str:
    """Return the name, with underscores appended while it is taken."""
    while name in taken:
        name += "_"
    return name
