"""The storages that each call of a program reads and writes, through views, in-place calls and state."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from inlay.analysis.aliasing import SIZE_OPS, Aliases, bind_arguments, may_be_tensor, storage_id
from inlay.analysis.auto_functionalized import is_auto_functionalized, parse_auto_functionalized
from inlay.analysis.state_updates import find_state_updates
from inlay.errors import ProgramError, UsageError
from inlay.program.gc_pause import pause_gc
from inlay.program.graphs import all_nodes, is_view, operands, subgraphs, target_text, written_operands
from inlay.streams.work_graph import Lifetime, Storage, Task, WorkGraph

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import fx

    from inlay.program.program import Program


GENERATOR = "default generator"
"""A storage that every call with random numbers reads and writes, so that they stay in program order."""
_COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d.", "c10d_functional.")
_OVERWRITE = frozenset(("copy_", "fill_", "zero_"))
"""Operators that overwrite an operand without reading it."""
_UNDECLARED_OPS = frozenset(("broadcast_tensors", "meshgrid", "native_batch_norm", "set_", "sum_to_size", "type_as"))
"""Operators that write to or return their operands, although neither schema nor tags declare it."""
_MAY_COPY = frozenset(("contiguous", "flatten", "ravel", "reshape", "reshape_as", "resolve_conj", "resolve_neg", "to"))
"""Operators that return a view or a copy, depending on the tensor. The result at run time may differ from tracing."""


def is_collective(node: fx.Node) -> bool:
    """Return whether a call, or a subgraph that it runs, communicates with other processes."""
    return any(target_text(_operator(each)).startswith(_COLLECTIVES) for each in _calls(node))


def _calls(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a call and all calls of the subgraphs that it runs."""
    if node.op == "call_function":
        yield node
    named = {each.target for each in node.all_input_nodes if each.op == "get_attr"}
    for name, module in subgraphs(node.graph) if named else ():
        if name in named:
            yield from (each for each in all_nodes(module.graph) if each.op == "call_function")


def _operator(node: fx.Node) -> Any:
    """Return the operator of a call; for auto_functionalized, the wrapped operator."""
    return node.args[0] if is_auto_functionalized(node) else node.target


def is_result_item(node: fx.Node) -> bool:
    """Return whether a node selects one of several results of a call, so it is not a task."""
    return node.target is operator.getitem and hasattr(node.args[0], "op")


class AccessSets:
    """Reads and writes of each call of a program, by the names of storages.

    A storage has the name of its first value. A state and its new value are one storage: either the state is written in
    place, or the new value is copied at the end. The resulting order is correct in both cases.

    A view accesses no memory. It depends on its base tensor, and other calls depend on the view. Both dependencies are
    storages of 0 bytes, so that calls wait for the tensor to exist and not for writes to its memory.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.aliases, self._same = _build_aliases(program)
        self.storages: dict[str, Storage] = {}
        self._value_storages: dict[fx.Node, tuple[str, ...]] = {}
        self._names: dict[fx.Node, str] = {}
        self._written: set[str] = set()
        self._uncertain_storages: set[str] = set()
        self._place = {node: index for index, node in enumerate(program.graph.nodes)}
        self._reshaped = {
            self.storage_name(each)
            for node in program.graph.nodes
            if _is_inplace_view(node)
            for each in written_operands(node)
        }
        """Storages of tensors whose sizes or memory change in place: views and sizes of them count as reads."""
        self.reads: dict[fx.Node, tuple[str, ...]] = {}
        self.writes: dict[fx.Node, tuple[str, ...]] = {}
        for node in program.graph.nodes:
            self._note(node)
        self._finish()

    def storage_name(self, node: fx.Node) -> str:
        """Return the name of the storage that contains a value."""
        if node not in self._names:
            first = min(self.aliases.members(node), key=self._place.__getitem__)
            self._names.update(dict.fromkeys(self.aliases.members(node), first.name))
        return self._names[node]

    def _note(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        if node.op not in ("placeholder", "get_attr", "call_function"):
            problem = f"{node.name} is a {node.op}, whose memory accesses are unknown."
            raise ProgramError(problem, "Use a captured program.")
        if node.op != "call_function":
            self._keep(node, Lifetime.INPUT)
            self._value_storages[node] = (self.storage_name(node),)
        elif is_result_item(node):
            self._add_result_item(node)
        else:
            looks = may_be_tensor(node) and is_view(node) and not written_operands(node) and not _is_opaque(node)
            if looks and self._is_known_alias(node):
                self._note_view(node)
            else:
                self.reads[node] = self._read(node)
                self._note_copy(node) if looks else self._note_write(node)

    def _read(self, node: fx.Node) -> tuple[str, ...]:
        if node.target in SIZE_OPS and not any(self.storage_name(each) in self._reshaped for each in operands(node)):
            return self._handles(operands(node))
        over = written_operands(node) if target_text(node.target).split(".")[1] in _OVERWRITE else ()
        reads = self._all_storages(each for each in operands(node) if each not in over)
        return tuple(
            dict.fromkeys((*reads, *(each for each in self._all_storages(over) if not self.storages[each].nbytes)))
        )

    def _add_result_item(self, node: fx.Node) -> None:
        """Add one of several results of a call; the call writes its storage."""
        whole, storage = node.args[0], self.storage_name(node)
        held = self._value_storages[whole]  # type: ignore[index]
        if storage in held:
            self._value_storages[node] = held
            return
        self._keep(node, Lifetime.INTERMEDIATE)
        self._value_storages[node] = (storage,)
        while is_result_item(whole):  # type: ignore[arg-type]
            whole = whole.args[0]  # type: ignore[union-attr]
        new = self._possible_allocation(node, whole)  # type: ignore[arg-type]
        self._set_writes(whole, [*self.writes[whole], storage, *new])  # type: ignore[arg-type,index]

    def _is_known_alias(self, node: fx.Node) -> bool:
        """Whether a view and its base were one storage in tracing and always are."""
        if self.storage_name(node) in self._reshaped or target_text(node.target).split(".")[1] in _MAY_COPY:
            return False
        known = storage_id(node.meta.get("val")) or storage_id(_first(node.meta.get("val")))
        return known is not None and all(
            storage_id(each.meta.get("val")) == known for each in self._aliased_operands(node)
        )

    def _note_view(self, node: fx.Node) -> None:
        shares = self._aliased_operands(node)
        numbers = [each for each in operands(node) if each not in shares]
        self.reads[node] = tuple(dict.fromkeys((*self._all_storages(numbers), *self._handles(shares))))
        self.storages[node.name] = Storage(node.name, Lifetime.INTERMEDIATE, (node.name,), 0)
        carried = [each for each in self._all_storages(shares) if self.storages[each].nbytes != 0]
        self._value_storages[node] = tuple(dict.fromkeys((self.storage_name(node), *carried, node.name)))
        self._set_writes(node, [node.name])

    def _note_copy(self, node: fx.Node) -> None:
        """Add a call that returns a view or a copy, known only at run time: its value is in new and old memory."""
        carried = [each for each in self._all_storages(self._aliased_operands(node)) if self.storages[each].nbytes != 0]
        self._value_storages[node] = tuple(dict.fromkeys((self.storage_name(node), *carried, node.name)))
        self._set_writes(node, [node.name])
        self._add_uncertain_storage(node)

    def _add_uncertain_storage(self, node: fx.Node) -> None:
        """Add a storage for memory that a call may allocate; its value may be in other storages instead."""
        self.storages[node.name] = Storage(node.name, Lifetime.INTERMEDIATE, (node.name,))
        self._uncertain_storages.update(each for each in self._value_storages[node] if each != node.name)

    def _possible_allocation(self, node: fx.Node, call: fx.Node) -> tuple[str, ...]:
        """Return a storage for memory that a call may allocate for a value whose aliasing is uncertain.

        It is not needed if the value is written in place, is known to be in an operand's storage, or is a state.
        """
        known = storage_id(node.meta.get("val"))
        seen = known is not None and any(storage_id(each.meta.get("val")) == known for each in operands(call))
        if self.storage_name(node) == node.name or seen or node in self._same or written_operands(call):
            return ()
        self._value_storages[node] += (node.name,)
        self._add_uncertain_storage(node)
        return (node.name,)

    def _aliased_operands(self, node: fx.Node) -> list[fx.Node]:
        return [each for each in operands(node) if self.aliases.may_share(each, node)]

    def _all_storages(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each for node in nodes for each in self._value_storages[node]))

    def _handles(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, map(self._handle, nodes))))

    def _handle(self, node: fx.Node) -> str | None:
        """Return the 0-byte storage for tasks that need a tensor but not its contents; None for inputs."""
        if node.op != "call_function":
            return None
        while is_result_item(node):
            node = node.args[0]  # type: ignore[assignment]
        if node.name in self.storages and self.storages[node.name].nbytes == 0:
            return node.name
        name = f"{node.name}:handle"
        if name not in self.storages:
            self.storages[name] = Storage(name, Lifetime.INTERMEDIATE, (), 0)
            self._set_writes(node, [*self.writes[node], name])
        return name

    def _note_write(self, node: fx.Node) -> None:
        """Add a call that creates a value, writes to operands, or may do so."""
        over = [
            each
            for each in self._all_storages((*written_operands(node), *_undeclared_accesses(node)))
            if self.storages[each].nbytes != 0
        ]
        self._keep(node, Lifetime.INTERMEDIATE)
        carried = self._all_storages(self._aliased_operands(node))
        self._value_storages[node] = tuple(dict.fromkeys((self.storage_name(node), *carried)))
        if _uses_generator(node):
            self.storages.setdefault(GENERATOR, Storage(GENERATOR, Lifetime.STATE, (), 0))
            self.reads[node] += (GENERATOR,)
            over.append(GENERATOR)
        self._set_writes(node, [*over, self.storage_name(node), *self._possible_allocation(node, node)])

    def _set_writes(self, node: fx.Node, storages: list[str]) -> None:
        self.writes[node] = tuple(dict.fromkeys(storages))
        self._written.update(storages)

    def _keep(self, node: fx.Node, life: Lifetime) -> None:
        name = self.storage_name(node)
        if name not in self.storages:
            self.storages[name] = Storage(name, life, (), _bytes(node.meta.get("val")))

    def _finish(self) -> None:
        """Set the lifetime and the values of each storage."""
        results: set[str] = set()
        returned: Any = self.program.graph.output_node().args[0]
        for value in returned:
            results.update(self._value_storages.get(value, ()))
        lie: dict[str, list[str]] = {}
        for node, names in self._value_storages.items():
            for name in names:
                lie.setdefault(name, []).append(node.name)
        for name, each in self.storages.items():
            life = each.lifetime
            if life is Lifetime.INPUT and name in self._written:
                life = Lifetime.STATE
            elif life is Lifetime.INTERMEDIATE and name in results:
                life = Lifetime.RESULT
            values = tuple(lie.get(name, each.values))
            self.storages[name] = Storage(name, life, values, each.nbytes, name in self._uncertain_storages)


def _build_aliases(program: Program) -> tuple[Aliases, set[fx.Node]]:
    """Return which nodes may share storage, including states and their new values, and which nodes certainly do."""
    known = {node: parse_auto_functionalized(node) for node in program.graph.nodes if is_auto_functionalized(node)}
    aliases = Aliases(program.graph, {node: None if each is None else each.lists for node, each in known.items()})
    for wrapped in filter(None, known.values()):
        for value in wrapped.aliased_results:
            for base in wrapped.bases:
                aliases.merge(value, base)
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values: Any = program.graph.output_node().args[0]
    same: set[fx.Node] = set()
    for state in find_state_updates(program):
        base = placeholders[state.binding.name]
        versions = [each for each in state.versions if state.is_eligible]
        for value in (*versions, values[state.output_index]):
            if hasattr(value, "op"):
                aliases.merge(value, base)
                same.add(value)
    constants: dict[Any, fx.Node] = {}
    inner = {name for name, _ in subgraphs(program.graph)}
    for node in program.graph.nodes:
        if node.op == "get_attr" and node.target not in inner:
            aliases.merge(node, constants.setdefault(node.target, node))
        if is_collective(node) and "wait_tensor" in target_text(node.target):
            aliases.merge(node, operands(node)[0])  # it returns its operand, which its schema does not declare
            same.add(node)
        for each in _undeclared_accesses(node) if may_be_tensor(node) else ():
            for value in (node, *filter(is_result_item, node.users)):
                aliases.merge(value, each)
    return aliases, same


def _is_opaque(node: fx.Node) -> bool:
    """Return whether a call may write to or return its operands without declaring it."""
    return getattr(node.target, "_schema", None) is None or is_collective(node) or bool(_undeclared_accesses(node))


def _undeclared_accesses(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a call may write to or return undeclared: all operands if its schema is incomplete.

    auto_functionalized has no schema, but it writes to copies only.
    """
    if node.op != "call_function" or is_result_item(node) or is_auto_functionalized(node):
        return []
    name = target_text(node.target).split(".")
    silent = name[0] == "aten" and (name[1] in _UNDECLARED_OPS or name[1].startswith("unsafe_"))
    tagged = torch.Tag.maybe_aliasing_or_mutating in getattr(node.target, "tags", ())
    if getattr(node.target, "_schema", None) is not None and not silent and not tagged:
        return []
    return [each for each in operands(node) if may_be_tensor(each)]


def _is_inplace_view(node: fx.Node) -> bool:
    """Return whether a call changes the sizes, strides or memory of a tensor in place."""
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def _uses_generator(node: fx.Node) -> bool:
    """Return whether a call, or a subgraph that it runs, uses random numbers.

    Attention operators have the tag, but use none without dropout.
    """
    seeded = torch.Tag.nondeterministic_seeded
    return any(
        seeded in getattr(_operator(each), "tags", ()) and (is_auto_functionalized(each) or _has_dropout(each))
        for each in _calls(node)
    )


def _has_dropout(node: fx.Node) -> bool:
    rates = [argument for argument in node.target._schema.arguments if argument.name == "dropout_p"]  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in bind_arguments(node)}
    return not rates or given.get("dropout_p", rates[0].default_value) != 0


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else None


def _bytes(value: Any) -> int | None:
    """Return the bytes of a value: 0 for numbers, None if sizes are symbolic or unknown.

    An empty tensor counts as unknown, because a write may resize it.
    """
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, value.element_size())
        return int(value.nbytes) or None if all(type(size) is int for size in sizes) else None
    if isinstance(value, (list, tuple)) or value is None:
        return None
    return 0


@pause_gc()
def build_work(program: Program, seconds: Mapping[str, float] | None = None) -> WorkGraph:
    """Return a work graph with one task per operator, named after it. All results of an operator belong to its task.

    `seconds`: operator → duration (`inlay.streams.measure_calls`). Without it the work can be checked, not scheduled.

    >>> import torch
    >>> from inlay.testing import program_of
    >>> print(build_work(program_of(lambda x: x.t().relu(), [torch.ones(2, 2)]), {"t": 1e-6, "relu": 2e-6}))
    t (1.0 µs): nothing -> t
    relu (2.0 µs): values_0, t -> relu
    """
    touched = AccessSets(program)
    parts: dict[str, list[str]] = {}
    owner: dict[fx.Node, str] = {}
    tasks = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        owner[node] = owner[node.args[0]] if is_result_item(node) else node.name
        parts.setdefault(owner[node], []).append(node.name)
    for node, reads in touched.reads.items():
        time = _time(node.name, seconds)
        calls = tuple(parts[node.name])
        tasks.append(Task(node.name, reads, touched.writes[node], time, is_collective(node), calls))
    return WorkGraph(tuple(tasks), tuple(touched.storages.values()))


def _time(name: str, seconds: Mapping[str, float] | None) -> float | None:
    if seconds is None:
        return None
    if name not in seconds:
        raise UsageError(f"The duration of {name} was not measured.", "Measure it, or set it to 0 seconds.")
    return seconds[name]
