"""Which storages the calls of a program touch, through views, in-place calls and state."""

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
"""The storage that every call that draws random numbers reads and writes: they come in the order of the program."""
_COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d.", "c10d_functional.")
_OVERWRITE = frozenset(("copy_", "fill_", "zero_"))
"""Operators that write to what they do not read."""
_UNDECLARED_OPS = frozenset(("broadcast_tensors", "meshgrid", "native_batch_norm", "set_", "sum_to_size", "type_as"))
"""Operators that write to their operands or hand them on, and neither their schemas nor their tags say so."""
_MAY_COPY = frozenset(("contiguous", "flatten", "ravel", "reshape", "reshape_as", "resolve_conj", "resolve_neg", "to"))
"""Views of some tensors and copies of others: what they were when the program was traced is not what they will be."""


def is_collective(node: fx.Node) -> bool:
    """Whether a call talks to other processes, or a graph that it runs does."""
    return any(target_text(_operator(each)).startswith(_COLLECTIVES) for each in _calls(node))


def _calls(node: fx.Node) -> Iterator[fx.Node]:
    """A call, and all calls of the graphs that it runs."""
    if node.op == "call_function":
        yield node
    named = {each.target for each in node.all_input_nodes if each.op == "get_attr"}
    for name, module in subgraphs(node.graph) if named else ():
        if name in named:
            yield from (each for each in all_nodes(module.graph) if each.op == "call_function")


def _operator(node: fx.Node) -> Any:
    """What a call calls; of a wrapper, what it wraps."""
    return node.args[0] if is_auto_functionalized(node) else node.target


def is_result_item(node: fx.Node) -> bool:
    """Whether a node is one of several results of a call, and nothing that is run by itself."""
    return node.target is operator.getitem and hasattr(node.args[0], "op")


class AccessSets:
    """Reads and writes of each call of a program, by the names of storages.

    A storage is called like the first value in it. A state and its new value are one storage: it is written in place,
    or the new value is kept until the end and copied, and the order is right for both.

    A view touches no memory. It needs the tensor that it is a view of, and is one that others need: both are storages
    without bytes, so that they wait for it and not for what is written to its memory meanwhile.
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
        """Storages of tensors whose sizes or memory are changed in place: to look at them is to read."""
        self.reads: dict[fx.Node, tuple[str, ...]] = {}
        self.writes: dict[fx.Node, tuple[str, ...]] = {}
        for node in program.graph.nodes:
            self._note(node)
        self._finish()

    def value_storages(self, node: fx.Node) -> tuple[str, ...]:
        """The storages that a value may lie in, and what has to be there to have the value at all."""
        return self._value_storages[node]

    def storage_name(self, node: fx.Node) -> str:
        """The storage that a value lies in."""
        if node not in self._names:
            first = min(self.aliases.members(node), key=self._place.__getitem__)
            self._names.update(dict.fromkeys(self.aliases.members(node), first.name))
        return self._names[node]

    def _note(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        if node.op not in ("placeholder", "get_attr", "call_function"):
            raise ProgramError(f"{node.name} is a {node.op}: nobody knows what it touches.", "Give a captured program.")
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
        """One of several results: there when the call is done, which makes it if it is new."""
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
        """Whether the values of a view and of what it looks at are in one storage, as they were when it was traced."""
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
        """A view, or a copy after all, as only the run knows: it lies in new memory and in the old."""
        carried = [each for each in self._all_storages(self._aliased_operands(node)) if self.storages[each].nbytes != 0]
        self._value_storages[node] = tuple(dict.fromkeys((self.storage_name(node), *carried, node.name)))
        self._set_writes(node, [node.name])
        self._add_uncertain_storage(node)

    def _add_uncertain_storage(self, node: fx.Node) -> None:
        """A storage for the memory that a call may have made, though its value may also lie in others."""
        self.storages[node.name] = Storage(node.name, Lifetime.INTERMEDIATE, (node.name,))
        self._uncertain_storages.update(each for each in self._value_storages[node] if each != node.name)

    def _possible_allocation(self, node: fx.Node, call: fx.Node) -> tuple[str, ...]:
        """A storage for the memory of a value that is put to others because nobody knows whether it lies there.

        None is needed where the value was written in place, was seen to lie in an operand, or is a state.
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
        """What a task waits for that needs a tensor and nothing of its contents; what is given is always there."""
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
        """A call that makes a new value, or writes into old ones, or may."""
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
        """How long each storage lives, and which values lie in it."""
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
    """Which nodes share storage, states and their new values included; and which lie where others do for sure."""
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
            aliases.merge(node, operands(node)[0])  # it hands on its operand, which its schema does not say
            same.add(node)
        for each in _undeclared_accesses(node) if may_be_tensor(node) else ():
            for value in (node, *filter(is_result_item, node.users)):
                aliases.merge(value, each)
    return aliases, same


def _is_opaque(node: fx.Node) -> bool:
    """Whether a call may write to what it hands on without saying so."""
    return getattr(node.target, "_schema", None) is None or is_collective(node) or bool(_undeclared_accesses(node))


def _undeclared_accesses(node: fx.Node) -> list[fx.Node]:
    """The tensors that a call may write to or hand on without saying so: all of them, where its schema says too little.

    A wrapper has no schema, and is known to write to copies.
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
    """Whether a call changes sizes, strides or memory of a tensor that stays the same tensor."""
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def _uses_generator(node: fx.Node) -> bool:
    """Whether a call draws random numbers, or a graph that it runs does.

    Attention has the tag, and draws none where nothing is dropped.
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
    """What a value takes; numbers nothing, and None where sizes are symbolic or unknown.

    Of a tensor of no elements nothing is known: who writes to it may give it some.
    """
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, value.element_size())
        return int(value.nbytes) or None if all(type(size) is int for size in sizes) else None
    if isinstance(value, (list, tuple)) or value is None:
        return None
    return 0


@pause_gc()
def build_work(program: Program, seconds: Mapping[str, float] | None = None) -> WorkGraph:
    """One task for each operator of a program, called like it; several results of an operator belong to its task.

    `seconds` are by operator (`inlay.streams.measure_calls`). Without them the work can be checked, not scheduled.

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
        raise UsageError(f"Nobody has measured {name}.", "Measure it, or say that it takes 0 seconds.")
    return seconds[name]
